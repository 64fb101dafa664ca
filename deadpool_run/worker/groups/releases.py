"""When a drain gives up on collectives that Gloo does not end by itself, and who is told."""

import threading
import time
from collections import deque
from collections.abc import Callable

from deadpool_run.worker.groups.waiters import Waiters

_GRACE_S = 0.05
"""From severing the connections until the works that Gloo has not ended are given up. Gloo ends most within 1 ms; those
whose message was cut in the middle never."""


class Releases:
    """Generations of communicators whose collectives are no longer waited for. Safe in any thread.

    One thread at most waits for the grace of all drains, however fast they follow one another.
    """

    def __init__(self, waiters: Waiters) -> None:
        self.newest = 0
        """The newest generation that was given up."""
        self._waiters = waiters
        self._lock = threading.Lock()
        self._callbacks: dict[Callable[[], object], int] = {}
        self._drains: deque[tuple[float, int]] = deque()

    def on(self, callback: Callable[[], object], generation: int) -> None:
        """Call back when the drain of that generation gives up on Gloo; at once if it has."""
        with self._lock:
            if self.newest < generation:
                self._callbacks[callback] = generation
                return
        callback()

    def off(self, callback: Callable[[], object]) -> None:
        """Forget what `on` was told."""
        with self._lock:
            self._callbacks.pop(callback, None)

    def begin(self, generation: int) -> None:
        """Give that generation up when its grace is over; its connections were just severed."""
        with self._lock:
            self._drains.append((time.monotonic() + _GRACE_S, generation))
            waits = len(self._drains) > 1
        if not waits:
            self._waiters.start(self._release)

    def _release(self) -> None:
        left = True
        while left:
            moment, generation = self._drains[0]
            threading.Event().wait(moment - time.monotonic())
            with self._lock:
                self.newest = max(self.newest, generation)
                due = [callback for callback, of in self._callbacks.items() if of <= generation]
                for callback in due:
                    del self._callbacks[callback]
            for callback in due:
                callback()
            with self._lock:
                self._drains.popleft()
                left = bool(self._drains)
