"""Marks what a run prints that does not count: the same lines were printed before, or will be when the step is repeated."""

import logging
import sys
import threading
from contextlib import suppress
from typing import Any, TextIO

REHEARSAL = "[rehearsal] "
INTERRUPTED = "[interrupted] "
_STREAMS = ("stdout", "stderr")


class MarkedStream:
    """A text stream that prefixes each line while `on`, and passes everything through while not."""

    def __init__(self, stream: TextIO, prefix: str = REHEARSAL) -> None:
        self.inner = stream
        """The stream itself."""
        self._at_line_start = True
        self.prefix = prefix
        self.on = True

    def write(self, text: str) -> int:
        """Write, marked. Returns the number of characters of `text`."""
        if not self._marks() or not text:
            return self.inner.write(text)
        body = text.removesuffix("\n")  # only a line feed starts a line, not the carriage return of a progress bar
        ending = text[len(body) :]
        marked = (self.prefix if self._at_line_start else "") + body.replace("\n", "\n" + self.prefix) + ending
        self._at_line_start = text.endswith("\n")
        self.inner.write(marked)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each."""
        self.write("".join(lines))

    def _marks(self) -> bool:
        """Whether this thread's lines are marked. In an interrupted step, another one may report on an earlier step."""
        return self.on and (self.prefix != INTERRUPTED or threading.current_thread() is threading.main_thread())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def install(prefix: str = REHEARSAL) -> None:
    """Mark standard output and error from now on. What is marked already stays so, but may become a rehearsal. Any thread."""
    for name in _STREAMS:
        stream = getattr(sys, name)
        if isinstance(stream, MarkedStream) and stream.on:
            if prefix == REHEARSAL:
                stream.prefix = prefix
            continue
        inner = _inner_of(stream)
        marked = MarkedStream(inner, prefix)
        setattr(sys, name, marked)
        _redirect(inner, marked)


def lift(prefix: str = REHEARSAL) -> None:
    """Stop marking with this prefix. The script may keep the marked stream for good, hence a switch on the stream, too."""
    for name in _STREAMS:
        stream = getattr(sys, name)
        if isinstance(stream, MarkedStream) and stream.prefix == prefix:
            stream.on = False
            setattr(sys, name, stream.inner)
            _redirect(stream.inner, stream.inner)


def _inner_of(stream: Any) -> Any:
    return stream.inner if isinstance(stream, MarkedStream) else stream


def _redirect(inner: Any, to: Any) -> None:
    """Have handlers of loggers that write to a stream, marked or not, write to another one. Does not wait: one may be in a write."""
    loggers = [logging.root, *list(logging.root.manager.loggerDict.values())]
    for logger in loggers:
        for handler in list(getattr(logger, "handlers", ())):  # a placeholder has none
            if isinstance(handler, logging.StreamHandler) and _inner_of(getattr(handler, "stream", None)) is inner:
                with suppress(AttributeError):  # a class of the script's may have its own way to find the stream
                    handler.stream = to
