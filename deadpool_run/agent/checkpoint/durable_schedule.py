"""When a durable checkpoint is due: after so many steps or minutes, looked at as rarely as the steps allow."""

import asyncio
from collections.abc import Callable

from deadpool_run.agent.spec import DurableSpec
from deadpool_run.ids import Version
from deadpool_run.vault.checkpoint_format import NOTHING
from deadpool_run.vault.vault import Vault

_LOOK_MIN_S = 0.02
_LOOK_MAX_S = 2.0
_NS_PER_S = 1e9
_FOLLOWING_RANK = 0  # whose steps tell when to look again: synchronous ranks are within one step of each other


class Schedule:
    """In the running loop. `look` is called when a checkpoint may be due; nothing is done without a place to write to."""

    def __init__(self, spec: DurableSpec | None, vault: Vault, look: Callable[[], None]) -> None:
        self._spec = spec
        self._vault = vault
        self._look = look
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self.written = NOTHING
        """The newest version known to be on the disk; set-up alone is not worth one."""

    def begin(self, age_s: float = 0.0) -> None:
        """Count from now, or from as long ago."""
        self.stop()
        if self._spec is None or not self._spec.target:
            return
        self._due_at = self._loop.time() + (self._spec.every_s or 0.0) - age_s
        self._timer = self._loop.call_later(self._pause(), self._tick)

    def stop(self) -> None:
        """Look no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def is_new(self, committed: Version | None) -> bool:
        """Tell whether this version is worth a checkpoint at all."""
        return committed is not None and committed > max(self.written, 0)

    def is_due(self, committed: Version | None) -> bool:
        """Tell whether this version is to be written now."""
        assert self._spec is not None
        if committed is None or not self.is_new(committed):
            return False
        if self._spec.every_steps is not None:
            return committed >= max(self.written, 0) + self._spec.every_steps
        return self._loop.time() >= self._due_at

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._pause(), self._tick)
        self._look()

    def _pause(self) -> float:
        """Return how long no checkpoint will be due: half the way to it, as the last step's time foretells."""
        assert self._spec is not None
        left_s = self._due_at - self._loop.time()
        if self._spec.every_steps is not None:
            rank_entry = self._vault.status_page.rank_entries[_FOLLOWING_RANK]
            steps = max(self.written, 0) + self._spec.every_steps - rank_entry.completed
            left_s = steps * rank_entry.step_ns / _NS_PER_S / 2
        return min(max(left_s, _LOOK_MIN_S), _LOOK_MAX_S)
