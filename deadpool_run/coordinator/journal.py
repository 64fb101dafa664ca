"""The journal: every event with its time and the orders that followed, as JSON lines that replay to the same state.

The first line names the format and holds the settings. A journal from the field is a test by itself.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.structs import Untagged
from deadpool_run.wire.typed import to_json

FORMAT = 2
"""Raised whenever a line can no longer be read as before: a class or field of events, effects or state was renamed."""


class Header(Untagged):
    """The first line. `state` is what the coordinator began with; None: a new job."""

    format: int
    settings: Settings
    state: State | None


class Entry(Untagged):
    """Any other line: one call of `coordinator.step`, with its event and the orders that it returned."""

    now: float
    event: Event
    effects: tuple[Effect, ...]


class Journal:
    """An append-only file that only its owner can read.

    A full disk never ends a job: after the first line that cannot be written, none is, and `failure` says why.
    """

    def __init__(self, path: Path, settings: Settings, state: State | None = None) -> None:
        """Create the file. Raises OSError (FileExistsError if it exists). `state` is what the coordinator begins with."""
        self.failure: OSError | None = None
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._append(Header(FORMAT, settings, state))

    def append(self, now: float, event: Event, effects: Sequence[Effect]) -> None:
        """Append one line."""
        self._append(Entry(now, event, tuple(effects)))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _append(self, line: Header | Entry) -> None:
        rest = to_json(line) + b"\n"
        try:
            while rest and self.failure is None:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            self.failure = error


def set_aside(path: Path, term: int) -> None:
    """Rename the journal of a node that has led before: the file of that name is the one of the last term."""
    if path.exists():
        path.rename(path.with_stem(f"{path.stem}-before-term-{term}"))
