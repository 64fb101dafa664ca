"""Files that the loop reads back with `torch.load`: what an earlier step wrote is state that no snapshot holds.

A replacement runs set-up and the first two steps again, and writes what they write. After a loss the file may have the weights of
step 0, say, and a script that goes back to its best weights would take these.
"""

import functools
import os
import stat
import time
from pathlib import Path
from typing import Any

import torch

_TICK_NS = 10_000_000
"""The clock that gives files their times is late by up to this."""


class FilesRead:
    """Notes what is loaded and was written since the loop began. By the time of the file: another rank may have written it."""

    def __init__(self) -> None:
        self._since: int | None = None
        self._found: dict[str, None] = {}
        self._told: set[str] = set()

    def begin(self) -> None:
        """Watch from now on."""
        if self._since is None:
            _note_loads(self)
        self._since = time.time_ns() - _TICK_NS

    def note(self, file: Any) -> None:
        """Note a file, or the name of one."""
        path = os.fspath(file) if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        if (
            isinstance(path, str)
            and path not in self._told
            and self._since is not None
            and _time_of(path) >= self._since
        ):
            self._found[path] = None

    def take(self) -> list[str]:
        """Return the files that were found since the last call, each once."""
        found, self._found = list(self._found), {}
        self._told.update(found)
        return found


def _note_loads(files: FilesRead) -> None:
    load = torch.load

    @functools.wraps(load)
    def noting(f: Any, *args: Any, **kwargs: Any) -> Any:
        files.note(f)
        return load(f, *args, **kwargs)

    torch.load = noting


def _time_of(path: str) -> int:
    """Return when a file was written, in nanoseconds; 0 if it is none."""
    try:
        found = Path(path).stat()
    except (OSError, ValueError):
        return 0
    return found.st_mtime_ns if stat.S_ISREG(found.st_mode) else 0


files_read = FilesRead()
"""Of this process, as `torch.load` is."""
