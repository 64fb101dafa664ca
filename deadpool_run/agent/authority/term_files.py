"""Files `NAME.TERM` in a folder on a shared disk: of several processes that claim a term, exactly one gets it.

A file is never replaced. Older ones are removed, which must not free their terms: a process that looked into the folder
long ago could link a removed term again. So a claim counts only if no larger term is there *after* the link, and the
file of the largest term is never removed.
"""

import contextlib
import re
from pathlib import Path

from deadpool_run.agent import atomic_file

_KEPT = 8
"""Files of older terms that stay, whatever their age."""
_KEPT_S = 600.0
"""Files younger than this stay too: no listing of the folder takes as long, and no NFS client caches one for as long."""
_READS = 8
"""Reads of the newest file before giving up. Only a process that stopped for `_KEPT_S` finds it removed."""


class TermFiles:
    """The files of one name in a folder that exists. Every method raises OSError."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self._file = re.compile(rf"{re.escape(name)}\.([0-9]+)")
        self._draft = re.compile(rf"\.{re.escape(name)}\.[0-9]+\.[0-9a-f]+")

    def newest(self) -> tuple[int, str] | None:
        """Return the largest term and its text; None if there is no file."""
        for _ in range(_READS):
            terms = self._terms()
            if not terms:
                return None
            with contextlib.suppress(FileNotFoundError):
                return max(terms), self._path(max(terms)).read_text(encoding="utf-8")
        raise FileNotFoundError(f"{self._path(max(terms))} is removed again and again")

    def claim(self, term: int, text: str) -> bool:
        """Write the file of a term; return whether it was free, and larger than all others."""
        if max(self._terms(), default=-1) >= term or not atomic_file.create(self._path(term), text):
            return False
        terms = self._terms()
        if max(terms, default=term) > term:
            return False
        with contextlib.suppress(OSError):  # the term is ours, tidy or not
            self._tidy(term, terms)
        return True

    def _terms(self) -> list[int]:
        return [int(match[1]) for path in self._folder.iterdir() if (match := self._file.fullmatch(path.name))]

    def _path(self, term: int) -> Path:
        return self._folder / f"{self._name}.{term}"

    def _tidy(self, term: int, terms: list[int]) -> None:
        """Remove old terms, and drafts of processes that died. The ages are by one clock, that of the disk's server."""
        now = self._path(term).stat().st_mtime
        drafts = [path for path in self._folder.iterdir() if self._draft.fullmatch(path.name)]
        for path in (*drafts, *map(self._path, sorted(terms)[: -1 - _KEPT])):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < now - _KEPT_S:
                    path.unlink()
