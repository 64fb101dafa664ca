"""Records of the leader that are on this machine: the last events in words, and the pace. A thread reads them: a disk may stall."""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from deadpool_run.agent.records.run_record import RECORD_NAME
from deadpool_run.cli.runs.events import Clock, Event, entries, journals_of, notable
from deadpool_run.coordinator.address import SAMPLES_NAME
from deadpool_run.errors import ProtocolError
from deadpool_run.text import moment
from deadpool_run.view.health import Status
from deadpool_run.view.pace import Pace
from deadpool_run.wire.typed import parse, read_object

EVENTS_KEPT = 8
_EVERY_S = 1.0
_END_S = 0.2
"""Time limit for the thread's end."""
_JOURNAL_BYTES = 1 << 20
"""The part of a journal that is read for its last events."""
_SAMPLES_BYTES = 1 << 14
_RECENT_S = 600.0
"""Samples of a long run are minutes apart. Older ones say nothing of the speed now."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The newest leader's records on this machine."""

    term: int
    """The term in which this leader was elected."""
    run_id: str = ""
    events: tuple[Event, ...] = ()
    steps_per_s: float | None = None


class RunRecords:
    """A context manager that keeps the records of one run up to date, as far as they are here."""

    def __init__(self, run_dir: Path) -> None:
        """Prepare. `run_dir`: that of the agent here."""
        self._root = run_dir.parent if run_dir.name.startswith("node-") else run_dir
        self._latest: Recorded | None = None
        self._journal: _JournalEnd | None = None
        self._was_read, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="deadpool-records", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(_END_S)  # longer only if it waits for the disk

    def wait(self, timeout_s: float) -> None:
        """Wait until the records have been read once."""
        self._was_read.wait(timeout_s)

    def of(self, status: Status) -> Recorded:
        """Return the records of the status' leader; empty if they are on another machine, or not read yet."""
        leader, latest, run_id = status.get("coordinator"), self._latest, status.get("run", {}).get("run_id")
        if latest is None or run_id != latest.run_id or (leader and leader.get("term") != latest.term):
            return Recorded(0)
        return latest

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._read()
            except OSError:
                self._latest = None  # another launch removes it
            self._was_read.set()
            self._stop.wait(_EVERY_S)

    def _read(self) -> None:
        found = journals_of(self._root)
        if not found:
            return
        if self._journal is None or self._journal.path != found[-1] or not self._journal.is_leaders:
            self._journal = _JournalEnd(found[-1], self._journal)
        journal = self._journal
        journal.read()
        self._latest = Recorded(journal.term, journal.run_id, tuple(journal.events), journal.steps_per_s)


class _JournalEnd:
    """The last events of a journal that grows."""

    def __init__(self, path: Path, before: "_JournalEnd | None") -> None:
        """`before` is what was read last: perhaps the part before this one."""
        self.path = path
        record = read_object(path.parent / RECORD_NAME)
        self.term, self.run_id = int(record.get("term") or 0), str(record.get("run_id"))
        self.is_leaders = bool(record.get("leader", True))
        """False while this agent has begun its journal, but not yet the record of its term."""
        self.steps_per_s = _recorded_pace(path.parent)
        self.events: deque[Event] = deque(maxlen=EVENTS_KEPT)
        if before is not None and before.is_leaders and (before.term, before.run_id) == (self.term, self.run_id):
            before.read()
            self.events.extend(before.events)
        self._clock = Clock(moment(record.get("started")))
        self._at = 0
        self._rest = b""

    def read(self) -> None:
        """Read what was added. At first, the first entry, which has the time of the start, and then the end."""
        with self.path.open("rb") as file:
            if not self._at:
                self._clock.header(file.readline().decode(errors="replace"))
                self._take([file.readline()])
                self._at = max(file.tell(), file.seek(0, os.SEEK_END) - _JOURNAL_BYTES)
            file.seek(self._at)
            data = file.read()
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        self._take(whole)

    def _take(self, lines: Iterable[bytes]) -> None:
        for entry in entries(line.decode(errors="replace") for line in lines):
            at = self._clock.time_of(entry)
            self.events.extend(Event(at, text) for text in notable(entry))


def _recorded_pace(folder: Path) -> float | None:
    """Return the steps per second of the last samples."""
    pace, samples = Pace(), list(_samples(folder / SAMPLES_NAME))
    for step, now in samples:
        if now > samples[-1][1] - _RECENT_S:
            pace.note(step, now)
    return pace.per_s()


def _samples(path: Path) -> Iterator[tuple[int, float]]:
    """Yield the steps and times of the last samples."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _SAMPLES_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            sample = parse(line)
            yield int(sample["step"]), float(sample["now"])
        except (ProtocolError, TypeError, KeyError, ValueError):
            continue  # one that was cut
