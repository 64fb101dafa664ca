"""One status for all viewers: it is made and encoded once for all who wait for it, and seldom enough to cost little."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from deadpool_run.wire.typed import to_json

_LOG = logging.getLogger("deadpool_run")
_FAILED = to_json({"error": "the status cannot be made: the leader's log says why"})
NO_LEADER = to_json({"error": "the job has no leader at this moment: try again in a few seconds"})


class Budget:
    """A share of a core's time, of which some may be used at once after a quiet while. Pure."""

    SHARE = 0.01
    BURST_S = 0.1
    """CPU seconds that may be used at once: a few hundred statuses of a small job, a few of one of 10,000 ranks."""
    LONGEST_PAUSE_S = 3.5
    """Viewers wait for 5 s."""

    def __init__(self) -> None:
        """Begin with nothing used."""
        self._used_s = 0.0
        self._at = 0.0

    def use(self, cpu_s: float, now: float) -> None:
        """Note that so many CPU seconds were used until now."""
        self._used_s = min(self._left(now) + cpu_s, self.BURST_S + self.LONGEST_PAUSE_S * self.SHARE)
        self._at = now

    def pause_s(self, now: float) -> float:
        """Return the time until there may be another use."""
        return max(0.0, self._left(now) - self.BURST_S) / self.SHARE

    def _left(self, now: float) -> float:
        """Return the used CPU seconds that are not earned yet."""
        return max(0.0, self._used_s - self.SHARE * (now - self._at))


class SharedStatus:
    """Passes the encoded status to everyone who asked before it was made, in the running loop."""

    def __init__(self, make: Callable[[], Mapping[str, Any]]) -> None:
        """Begin. `make` returns the status object; if it raises, the error is logged and the viewers are told."""
        self._make = make
        self._budget = Budget()
        self._waiting: list[Callable[[bytes], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def request(self, then: Callable[[bytes], None]) -> None:
        """Pass the next status to `then`, as a JSON object on one line."""
        self._waiting.append(then)
        if self._closed:
            self._send(NO_LEADER)
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._budget.pause_s(loop.time()), self._pass_on)

    def close(self) -> None:
        """Tell everyone who waits, or asks from now on, that nobody leads the job here."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._send(NO_LEADER)

    def _pass_on(self) -> None:
        began = time.thread_time()
        try:
            status = to_json(self._make())
        except Exception:  # noqa: BLE001 - a viewer must not end the job
            _LOG.exception("the status cannot be made")
            status = _FAILED
        self._budget.use(time.thread_time() - began, asyncio.get_running_loop().time())
        self._send(status)

    def _send(self, status: bytes) -> None:
        waiting, self._waiting, self._timer = self._waiting, [], None
        for then in waiting:
            then(status)
