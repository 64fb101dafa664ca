"""The simulation's clock, and the channels between the coordinator and each worker."""

import heapq
import itertools
import random
from collections.abc import Callable


class Clock:
    """A heap of future calls, and the time of the last one."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), what))

    def after(self, delay: float, what: Callable[[], None]) -> None:
        self.at(self.now + delay, what)

    def next(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def run_next(self) -> None:
        when, _, what = heapq.heappop(self._heap)
        self.now = when
        what()


class Channel:
    """One direction of a socket. Messages stay in order and take a random time, independent of other channels."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._last = 0.0

    def send(self, arrive: Callable[[], None]) -> None:
        delay = self._rng.uniform(0.3, 1.5) if self._rng.random() < 0.05 else self._rng.uniform(0.001, 0.05)
        self._last = max(self._last, self._clock.now + delay)
        self._clock.at(self._last, arrive)
