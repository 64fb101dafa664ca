"""Schedule of durable checkpoints: due after a number of steps or minutes."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from deadpool_run.ids import Version
from deadpool_run.vault.checkpoint_format import NOTHING
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.checkpoints import DurableSpec

_CHECK_MIN_S = 0.02
_CHECK_MAX_S = 2.0
_PAUSE_S = 10.0
"""Least time between a failure and the next attempt, however short the steps are."""
_NS_PER_S = 1e9
_OBSERVED_RANK = 0
"""The rank whose steps are observed: synchronous ranks are within one step of each other."""


@dataclass(eq=False, slots=True)
class Schedule:
    """Calls `check` in the running loop when a checkpoint may be due. Does nothing without a place to write to."""

    spec: DurableSpec | None
    vault: Vault
    check: Callable[[], None]
    written: Version = NOTHING
    """The newest version known to be on the disk. Version 0, the state after set-up, is never written."""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _timer: asyncio.TimerHandle | None = None
    _due_at: float = 0.0
    _counted_from: int = 0
    """The version that steps are counted from: the newest on the disk, or one that could not be written."""

    def begin(self, age_s: float = 0.0) -> None:
        """Count from now, or from `age_s` seconds ago."""
        self.stop()
        if self.spec is None or not self.spec.target:
            return
        self._due_at = self._loop.time() + (self.spec.every_s or 0.0) - age_s
        self._counted_from = max(self.written, 0)
        self._timer = self._loop.call_later(self._pause(), self._tick)

    def failed(self, version: Version | None) -> None:
        """Count from this version, which could not be written. None: from the last one."""
        counted_from = self._counted_from if version is None else version
        self.begin()
        self._due_at = max(self._due_at, self._loop.time() + _PAUSE_S)
        self._counted_from = counted_from

    def stop(self) -> None:
        """Stop checking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def is_new(self, committed: Version | None) -> bool:
        """Return whether this version is newer than the newest on the disk."""
        return committed is not None and committed > max(self.written, 0)

    def is_due(self, committed: Version | None) -> bool:
        """Return whether this version must be written now."""
        assert self.spec is not None
        if committed is None or not self.is_new(committed):
            return False
        if self.spec.every_steps is not None and committed < self._counted_from + self.spec.every_steps:
            return False
        return self._loop.time() >= self._due_at

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._pause(), self._tick)
        self.check()

    def _pause(self) -> float:
        """Return the time until the next check: half the time to the due step, estimated from the last step."""
        assert self.spec is not None
        left_s = self._due_at - self._loop.time()
        if self.spec.every_steps is not None:
            rank_entry = self.vault.status_page.rank_entries[_OBSERVED_RANK]
            steps = self._counted_from + self.spec.every_steps - rank_entry.completed
            left_s = max(left_s, steps * rank_entry.step_ns / _NS_PER_S / 2)
        return min(max(left_s, _CHECK_MIN_S), _CHECK_MAX_S)
