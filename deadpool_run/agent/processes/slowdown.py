"""A process that is slowed for a time, by stops that alternate with short runs."""

import asyncio
from collections.abc import Callable
from signal import SIGCONT, SIGSTOP

from deadpool_run.agent.processes.children import Process

_PERIOD_S = 0.1
"""A run and the stop after it: short beside the steps that are to be slow."""
_LEAST_RUN_S = 0.002
"""A timer of a busy machine cannot measure a shorter run. The stop is longer instead."""


class Slowdown:
    """Starts in the running loop. The process runs 1/`factor` of the time, and takes `factor` times as long for everything.

    Each stop is as long as the run before it asks for, less what earlier stops were too long: timers of a busy machine are late.
    Its threads stop too, its children do not. Work that a GPU has begun goes on.
    """

    def __init__(self, process: Process, factor: float, for_s: float, is_suspended: Callable[[], bool]) -> None:
        """`is_suspended`: whether the process must not run for another reason."""
        self._process, self._factor, self._is_suspended = process, factor, is_suspended
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + for_s
        self._since = self._loop.time()
        self._owed_s = 0.0
        """How long it must be stopped for what it has run."""
        self._timer = self._loop.call_later(self._run_s, self._stop)

    def close(self) -> None:
        """Let the process run at its own speed from now on."""
        self._timer.cancel()
        self._continue()

    @property
    def _run_s(self) -> float:
        return max(_LEAST_RUN_S, _PERIOD_S / self._factor)

    def _elapsed(self) -> float:
        before, self._since = self._since, self._loop.time()
        return self._since - before

    def _stop(self) -> None:
        self._owed_s += (self._factor - 1) * self._elapsed()
        if not self._process.alive or self._since >= self._until:
            return
        if self._owed_s > 0:
            self._process.signal(SIGSTOP)
        self._timer = self._loop.call_later(max(0.0, min(self._owed_s, self._until - self._since)), self._go_on)

    def _go_on(self) -> None:
        self._owed_s -= self._elapsed()
        self._continue()
        if self._process.alive and self._since < self._until:
            self._timer = self._loop.call_later(self._run_s, self._stop)

    def _continue(self) -> None:
        if not self._is_suspended():
            self._process.signal(SIGCONT)
