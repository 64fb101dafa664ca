"""Marks what a run for practice prints: the rank's last owner has printed the same lines before, or the second run will."""

import sys
from typing import Any, TextIO

PREFIX = "[rehearsal] "


class MarkedStream:
    """A text stream that prefixes each line while `on`, and passes everything through while not."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_line_start = True
        self.on = True

    def write(self, text: str) -> int:
        """Write, marked. Returns the number of characters of `text`."""
        if not self.on or not text:
            return self._stream.write(text)
        body = text.removesuffix("\n")  # only a line feed starts a line, not the carriage return of a progress bar
        ending = text[len(body) :]
        marked = (PREFIX if self._at_line_start else "") + body.replace("\n", "\n" + PREFIX) + ending
        self._at_line_start = text.endswith("\n")
        self._stream.write(marked)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each."""
        self.write("".join(lines))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def install() -> None:
    """Mark standard output and error from now on."""
    sys.stdout = MarkedStream(sys.stdout)
    sys.stderr = MarkedStream(sys.stderr)


def lift() -> None:
    """Stop marking. A logging handler may keep the marked stream for good, hence a switch on the stream, too."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, MarkedStream):
            stream.on = False
            setattr(sys, name, stream._stream)  # noqa: SLF001 - same module
