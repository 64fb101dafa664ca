"""Samples of a run's progress, for `deadpool-run report`: one line of JSON each second, fewer in a long run.

    {"now": 12.5, "step": 130, "step_s": 0.05, "capture_s": 0.002, "committed": 129, "bytes": 16777216}

`now` is the journal's clock. `step` is the most steps that a rank has completed, `step_s` and `capture_s` are those of the slowest
rank, `bytes` what snapshots and copies take on this machine. The time between two is a second, or a thousandth of the time so
far: a run of a day has some 5,500 lines, one of a month some 9,000. With very many ranks it is longer: see `_COST`.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from deadpool_run.coordinator.address import SAMPLES_NAME
from deadpool_run.coordinator.sink import Sink, Stream
from deadpool_run.vault.status_page import StatusPage
from deadpool_run.wire.typed import to_json

EVERY_S = 1.0
_SHARE = 1000.0
_COST = 0.002
"""Samples take at most this part of a core: one of 80,000 ranks takes 50 ms."""
_GRACE_S = 2.0
"""Time limit for the disk when the process ends."""


def sample(status_page: StatusPage, now: float) -> bytes:
    """Return the line of this moment."""
    parts = {
        "now": round(now, 3),
        "step": status_page.most_completed(),
        "step_s": round(status_page.step_s(), 6),
        "capture_s": round(max(entry.capture_ns for entry in status_page.rank_entries) / 1e9, 6),
        "committed": status_page.committed(),
        "bytes": status_page.taken,
    }
    return to_json(parts) + b"\n"


class Samples:
    """The sample file of one leader, written by a thread. Lines that a stalled disk does not accept are dropped."""

    def __init__(self, run_dir: Path, page: Callable[[], StatusPage], clock: Callable[[], float]) -> None:
        """Take the first sample now. `page` returns the present status page, as each start of the world creates one. `clock` is the coordinator's."""
        path = run_dir / SAMPLES_NAME
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._sink = Sink("deadpool-samples", 1 << 16, stays=False)
        self._stream = Stream(self._sink, lambda: os.open(path, flags, 0o600))
        self._page, self._clock = page, clock
        self._loop = asyncio.get_running_loop()
        self._began_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._take()

    def take(self) -> None:
        """Take an additional sample, for example at the end of a repair."""
        self._stream.put(sample(self._page(), self._clock()))

    def _take(self) -> None:
        before_s = time.thread_time()
        self.take()
        cost_s = time.thread_time() - before_s
        every_s = max(EVERY_S, (self._loop.time() - self._began_at) / _SHARE, cost_s / _COST)
        self._timer = self._loop.call_later(every_s, self._take)

    def close(self, *, wait: bool) -> None:
        """Take the last sample, and close the file. `wait`: wait a moment for the disk."""
        if self._timer is not None:
            self._timer.cancel()
        self.take()
        self._stream.close()
        self._sink.close(_GRACE_S if wait else 0.0)
