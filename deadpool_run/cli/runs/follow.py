"""Reads files that grow while a run lives."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

Follow = Annotated[bool, typer.Option("-f", "--follow", help="Continue until the run ends.")]
_EVERY_S = 0.25
_CHUNK = 1 << 20


class Tail:
    """The whole lines of a file, as far as it has been written."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""

    def lines(self, *, last: bool = False) -> Iterator[str]:
        """Yield the lines that were added since the last call. `last`: also one that has no end."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            file.seek(self._at)
            while data := file.read(_CHUNK):
                self._at += len(data)
                *whole, self._rest = (self._rest + data).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
        if last and self._rest:
            rest, self._rest = self._rest, b""
            yield rest.decode(errors="replace")


def follow(
    find: Callable[[], Sequence[Path]], has_ended: Callable[[], bool], *, wait: bool
) -> Iterator[tuple[Path, str]]:
    """Yield the lines of the files with their paths; with `wait`, also those that come until the run has ended.

    `find` returns the files, which may become more.
    """
    tails: dict[Path, Tail] = {}
    while True:
        ended = not wait or has_ended()
        for path in find():
            for line in tails.setdefault(path, Tail(path)).lines(last=ended):
                yield path, line
        if ended:
            return
        time.sleep(_EVERY_S)
