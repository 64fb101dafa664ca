"""The simulated machine: time, the channels between the coordinator and each worker, and the vault."""

import heapq
import itertools
import random
from collections.abc import Callable


class Clock:
    """A heap of things to happen; nothing happens between them."""

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
    """One direction of one socket: keeps its order, takes a random time, and says nothing of the other channels."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._rng = rng
        self._last = 0.0

    def send(self, arrive: Callable[[], None]) -> None:
        delay = self._rng.uniform(0.3, 1.5) if self._rng.random() < 0.05 else self._rng.uniform(0.001, 0.05)
        self._last = max(self._last, self._clock.now + delay)
        self._clock.at(self._last, arrive)


Snapshot = tuple[int, int]
"""A version, and a token of its content: the same token is the same bytes."""


class Vault:
    """Two slots per rank, outliving the workers, under the rule that keeps what is committed."""

    def __init__(self, world_size: int) -> None:
        self.slots: list[list[Snapshot | None]] = [[None, None] for _ in range(world_size)]
        self.skipped: list[int] = [-1] * world_size

    def clear(self) -> None:
        self.slots = [[None, None] for _ in self.slots]
        self.skipped = [-1] * len(self.slots)

    def held(self, rank: int) -> dict[int, int]:
        return dict(slot for slot in self.slots[rank] if slot is not None)

    def committed(self) -> int:
        return max(set.intersection(*(set(self.held(rank)) for rank in range(len(self.slots)))), default=-1)

    def capture(self, rank: int, snapshot: Snapshot) -> bool:
        """Keep a snapshot; tell whether there was a free slot."""
        committed, slots = self.committed(), self.slots[rank]
        free = [
            (-1 if slot is None else slot[0], index)
            for index, slot in enumerate(slots)
            if slot is None or slot[0] < committed or (slot[0] > committed and slot[0] in self.skipped)
        ]
        if free:
            slots[min(free)[1]] = snapshot
            if self.skipped[rank] == snapshot[0]:
                self.skipped[rank] = -1
        return bool(free)

    def skip(self, rank: int, version: int) -> None:
        self.skipped[rank] = version

    def empty_above(self, rank: int, version: int) -> None:
        self.slots[rank] = [slot if slot is None or slot[0] <= version else None for slot in self.slots[rank]]
        if self.skipped[rank] > version:
            self.skipped[rank] = -1
