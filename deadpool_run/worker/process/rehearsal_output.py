"""Marks what a rehearsing replacement prints: those lines were printed before, by the rank's last owner."""

import sys
from typing import Any, TextIO

PREFIX = "[rehearsal] "


class MarkedStream:
    """A text stream that begins each line with a mark while it is on, and is the stream itself once it is off."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._at_line_start = True
        self.on = True

    def write(self, text: str) -> int:
        """Write, marked. Returns the number of characters of `text`."""
        if not self.on or not text:
            return self._stream.write(text)
        body = text.removesuffix("\n")  # only a line feed begins a line: a progress bar's carriage returns do not
        ending = text[len(body) :]
        marked = (PREFIX if self._at_line_start else "") + body.replace("\n", "\n" + PREFIX) + ending
        self._at_line_start = text.endswith("\n")
        self._stream.write(marked)
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        """Write each."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the stream's own."""
        return getattr(self._stream, name)


def install() -> None:
    """Mark standard output and error from here on."""
    sys.stdout = MarkedStream(sys.stdout)
    sys.stderr = MarkedStream(sys.stderr)


def lift() -> None:
    """Stop marking. A logging handler may hold the marked stream for good, hence a switch and not only a swap."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, MarkedStream):
            stream.on = False
            setattr(sys, name, stream._stream)  # noqa: SLF001 - same module
