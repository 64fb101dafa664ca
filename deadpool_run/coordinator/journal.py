"""The journal: every event with its time and the orders that followed, as JSON lines that replay to the same state.

The first line names the format and holds the settings. A journal from the field is a test by itself.

A thread writes it, so that no decision waits for a disk. If the disk stalls and lines are dropped, one line names their number
and holds the state after them. The journal of a long run has several parts, of which the first and the newest are kept. Each
part is a journal by itself.
"""

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from deadpool_run.coordinator.sink import PATIENCE_S, Sink, Stream
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.structs import Untagged
from deadpool_run.wire.typed import to_json

FORMAT = 4
"""Raised whenever a line can no longer be read as before: a class or field of events, effects or state was renamed."""


class Header(Untagged):
    """The first line. `state` is what the coordinator began with; None: a new job.

    `began` is the time of the first event in the first part; None in that part.
    """

    format: int
    settings: Settings
    state: State | None
    began: float | None = None


class Entry(Untagged):
    """Any other line: one call of `coordinator.step`, with its event and the orders that it returned."""

    now: float
    event: Event
    effects: tuple[Effect, ...]


class Gap(Untagged):
    """A line in place of others that were dropped."""

    dropped: int
    state: State
    """The coordinator's after the last of them."""


_MAX_BYTES = 32 << 20
"""Lines that wait for the disk. The first line, with the state of tens of thousands of ranks, may be longer."""
_GAP_SHARE = 50
"""After a gap, states take at most one part in so many of the time. One of a large world may fill the queue, and cause the next gap."""
_PART_BYTES = 64 << 20
_NEWEST_PARTS = 7
"""How many parts are kept after the first."""


class Journal:
    """Append-only files that only their owner can read.

    A full disk never ends a job: after the first line that cannot be written, none is, and `failure` says why.
    """

    def __init__(
        self,
        path: Path,
        settings: Settings,
        state: State | None = None,
        *,
        term: int = 0,
        on_fault: Callable[[OSError], None] = lambda _: None,
    ) -> None:
        """Begin the journal. `state` is what the coordinator begins with; None: a new job.

        The journal of a new job is created at once, and raises OSError: FileExistsError is the refusal of a second job in one
        directory. A leader of a later `term` waits for no disk: its directory is its own, and an earlier journal is renamed.
        """
        self._path, self._settings, self._report = path, settings, on_fault

        def create_again() -> int:
            set_aside(path, term)
            return _create(path)

        header = to_json(Header(FORMAT, settings, state))
        self._sink = Sink("deadpool-journal", _MAX_BYTES + len(header))  # it has the state, which may be large
        fd = _create(path) if state is None else -1
        self._failure: OSError | None = None
        self._began: float | None = None
        self._part_bytes = 0
        self._skipped = 0
        self._gap = 0
        """Lines dropped since the last one that was written."""
        self._again_at = 0.0
        """When a gap may end, in the time of the coordinator."""
        self._state: State | None = None
        self._stream = self._stream_to(create_again if state is not None else lambda: fd)
        self._put(header)

    def _stream_to(self, opener: Callable[[], int]) -> Stream:
        return Stream(self._sink, opener, on_fault=self._note_fault, ends_at_fault=True)

    def _note_fault(self, error: OSError) -> None:
        self._failure = error
        self._report(error)

    def _put(self, line: bytes) -> bool:
        self._part_bytes += len(line)
        return self._stream.put(line + b"\n")

    @property
    def failure(self) -> OSError | None:
        """Why the journal has ended early."""
        return self._failure

    @property
    def dropped(self) -> int:
        """The number of lines that are missing."""
        return self._skipped + self._stream.dropped

    def append(self, now: float, event: Event, effects: Sequence[Effect], state: State) -> None:
        """Append one line. `state` is the coordinator's after the event."""
        self._began = now if self._began is None else self._began
        if self._gap or self.failure is not None:
            self._skip(now, state)
            return
        keeps_up = self._sink.is_empty
        if not self._put(to_json(Entry(now, event, tuple(effects)))):
            self._gap, self._state = 1, state
        elif keeps_up and self._part_bytes > _PART_BYTES:
            self._begin_part(state)

    def _begin_part(self, state: State) -> None:
        """Continue in another file, unless there is no room for its first line: then only after as many bytes again."""
        before, stream = self._stream, self._stream_to(lambda: _create_part(self._path))
        line = to_json(Header(FORMAT, self._settings, state, self._began)) + b"\n"
        self._part_bytes = 0
        if stream.put(line):
            self._skipped += before.dropped
            self._stream = stream
            before.close()

    def _skip(self, now: float, state: State) -> None:
        """Leave a line out. Once the disk has taken all that waits, continue with the state, but not too often."""
        self._gap, self._state = self._gap + 1, state
        self._skipped += 1
        if self.failure is None and self._sink.is_empty and now >= self._again_at:
            self._again_at = now + _GAP_SHARE * self._end_gap()

    def _end_gap(self, patience_s: float | None = None) -> float:
        """Write the state; return how long its encoding took, in seconds."""
        assert self._state is not None
        began = time.perf_counter()
        line = to_json(Gap(self._gap, self._state)) + b"\n"
        took_s = time.perf_counter() - began
        self._stream.put(line, patience_s=patience_s)
        self._gap = 0
        return took_s

    def close(self, grace_s: float = 10.0) -> None:
        """Close the file, and wait up to `grace_s` for its last line. A second call does nothing."""
        if self._gap and self.failure is None:
            self._end_gap(min(grace_s, PATIENCE_S))
        self._stream.close()
        self._sink.close(grace_s)


def set_aside(path: Path, term: int) -> None:
    """Rename the journal of a node that has led before: the file of that name is the one of the last term."""
    if path.exists():
        path.rename(path.with_stem(f"{path.stem}-before-term-{term}"))


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _create_part(path: Path) -> int:
    """Create the next part, and remove all but the newest ones."""
    parts = sorted(
        int(found[1])
        for each in path.parent.glob(f"{path.stem}-*{path.suffix}")
        if (found := re.fullmatch(rf"{re.escape(path.stem)}-(\d+)", each.stem))
    )
    for number in parts[: -_NEWEST_PARTS + 1]:
        with suppress(FileNotFoundError):  # another launch removes the run
            part_of(path, number).unlink()
    return _create(part_of(path, max(parts, default=1) + 1))


def part_of(path: Path, number: int) -> Path:
    """Return the path of a part of the journal after the first, from 2 on."""
    return path.with_stem(f"{path.stem}-{number}")
