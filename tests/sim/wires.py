"""The simulated network between agents, and the storage of nodes on this network."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Iterable

from machine import Clock
from storage import Keep, Snapshot, Storage
from workers import Gathering, Worker

Pair = tuple[str, str]


class Net:
    """The network. Messages of a pair stay in order. Those sent during a cut arrive after it is healed."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock, self._rng = clock, rng
        self.cuts: Counter[Pair] = Counter()
        """For each pair, the number of faults that cut it now."""
        self._healed_at: dict[Pair, float] = {}
        self._queues: dict[Pair, deque[Callable[[], None]]] = {}
        self._stalled: Counter[Pair] = Counter()
        self._last: dict[Pair, float] = {}

    def send(self, source: str, target: str, arrive: Callable[[], None]) -> None:
        pair = source, target
        self._queues.setdefault(pair, deque()).append(arrive)
        self._move_on(pair)

    def _move_on(self, pair: Pair) -> None:
        """Let one more message of the pair arrive after a while, the oldest first."""
        slow = self._rng.random() < 0.03
        delay = 0.0 if pair[0] == pair[1] else self._rng.uniform(0.1, 0.6) if slow else self._rng.uniform(0.001, 0.03)
        self._last[pair] = max(self._last.get(pair, 0.0), self._clock.now + delay)
        self._clock.at(self._last[pair], lambda: self._arrive(pair))

    def _arrive(self, pair: Pair) -> None:
        if self.cuts[pair]:
            self._stalled[pair] += 1
        else:
            self._queues[pair].popleft()()

    def cut(self, pairs: Iterable[Pair]) -> None:
        self.cuts.update(pairs)

    def heal(self, pairs: Iterable[Pair]) -> None:
        for pair in pairs:
            self.cuts[pair] -= 1
            if not self.cuts[pair]:
                self._healed_at[pair] = self._clock.now
                for _ in range(self._stalled.pop(pair, 0)):
                    self._move_on(pair)

    def linked(self, one: str, other: str) -> bool:
        return not self.cuts[one, other] and not self.cuts[other, one]

    def apart_since(self, since: float, nodes: Iterable[str]) -> list[Pair]:
        """Return the pairs of these nodes that were cut at some time since then."""
        pairs = itertools.permutations(nodes, 2)
        return [pair for pair in pairs if self.cuts[pair] or self._healed_at.get(pair, -1.0) >= since]


class CutStorage(Storage):
    """Storage on a network with cuts: changes reach each node by a message, if at all, and so do copies."""

    def __init__(self, clock: Clock, rng: random.Random, world_size: int, net: Net) -> None:
        super().__init__(clock, rng, world_size)
        self._net = net
        self.keep: dict[tuple[int, int, int], Keep] = {}
        """For each order, the nodes that keep each rank's copies."""
        self._told = (0, 0, 0)
        self._begun = (0, 0, 0)
        self._assigned: dict[int, tuple[int, int, int]] = {}
        self._moving: set[int] = set()
        """Ranks that replacements take. Nothing is copied to their buddies before they are attached."""
        self.suspended: set[str] = set()
        """Nodes whose workers are stopped. The leader gets no report of their copies, so these are not committed."""

    def reaches(self, source: str, target: str) -> bool:
        return self.nodes[source].alive and (source == target or self._net.linked(source, target))

    def _covering(self):
        """Assert nothing: memory of nodes that the leader has given up counts as alive here."""
        return contextlib.nullcontext()

    def known_committed(self) -> int:
        """Return what the buddies have now: a new leader does not know what was committed before."""
        return self.committed()

    def clear_on(self, name: str, key: tuple[int, int, int]) -> None:
        if key > self._begun:
            self._begun = key
            self.homes, self.buddies = {}, ()
            self.skipped = [-1] * self._world_size
            self._moving.clear()
            self.resumed, self._newest_committed = 0, -1
        self.nodes[name].slots, self.nodes[name].copies = {}, {}
        self.epochs.pop(name, None)

    def assign_on(self, name: str, rank: int, key: tuple[int, int, int], *, known_there: bool) -> None:
        home = self.homes.get(rank)
        self.assign(rank, name, known_there=known_there)
        if home is not None and key < self._assigned.get(rank, key):
            self.homes[rank] = home  # a late order to a node that was given up
        else:
            self._assigned[rank] = key
            self._moving.add(rank)

    def attach_on(self, name: str, rank: int, epoch: int) -> None:
        """End the repair of this rank, and copy its snapshots from its new node."""
        if rank in self._moving and self.homes[rank] == name:
            self._moving.discard(rank)
            self._send_held(rank, epoch)

    def _send_held(self, rank: int, epoch: int, newest: int | None = None) -> None:
        for version, token in self.held(rank).items():
            if newest is None or version <= newest:
                self._send(rank, (version, token), epoch)

    def _send(self, rank: int, snapshot: Snapshot, epoch: int) -> None:
        if rank not in self._moving:
            super()._send(rank, snapshot, epoch)

    def set_buddies_on(
        self, name: str, buddies: tuple[tuple[str, ...], ...], key: tuple[int, int, int], epoch: int
    ) -> None:
        if key > self._told:
            self._told = key
            self.buddies = buddies
        node = self.nodes[name]
        for rank in list(node.copies):
            if buddies and name not in self.keep[key][rank]:
                node.copies.pop(rank)
        for rank, home in self.homes.items():
            if home == name:
                self._moving.discard(rank)
                self._send_held(rank, epoch)

    def discard_on(self, name: str, epoch: int, version: int) -> None:
        """Drop newer versions of an older timeline, and refuse copies of it that still arrive."""
        if epoch >= max(self.epochs.values(), default=0):
            self.resumed, self._newest_committed = version, min(self._newest_committed, version)
        self.epochs[name] = max(epoch, self.epochs.get(name, 0))
        node = self.nodes[name]
        for rank, slots in node.slots.items():
            if self.homes.get(rank) != name:
                node.slots[rank] = [slot if slot is None or slot[0] <= version else None for slot in slots]
        for rank, copies in node.copies.items():
            node.copies[rank] = {each: kept for each, kept in copies.items() if each <= version or kept[1] >= epoch}
        for rank, home in self.homes.items():
            if home == name:
                self._send_held(rank, epoch, newest=version)

    def _arrive(self, source, name, rank, snapshot, epoch):
        if self._net.linked(source.name, name) and source.name not in self.suspended:
            super()._arrive(source, name, rank, snapshot, epoch)
        elif source.alive and self.nodes[name].alive:  # the connection is not known to be broken, and tries again
            self._clock.after(0.1, lambda: self._arrive(source, name, rank, snapshot, epoch))

    def fetch(self, source: str, rank: int, version: int, node: str) -> bool:
        return self.reaches(source, node) and super().fetch(source, rank, version, node)


class CutGathering(Gathering):
    """Collectives that wait until all hosts can reach each other."""

    def arrive(self, worker: Worker) -> None:
        here = {**self.present.get(worker.attached, {}), worker.rank: worker}
        hosts = sorted({each.node for each in here.values()})
        linked = all(self.sim.net.linked(one, other) for one in hosts for other in hosts)
        if len(here) == self.sim.settings.world_size and not linked:
            self.present.setdefault(worker.attached, {})[worker.rank] = worker
        else:
            super().arrive(worker)

    def healed(self) -> None:
        for here in list(self.present.values()):
            if len(here) == self.sim.settings.world_size:
                worker = here.pop(next(iter(here)))
                self.arrive(worker)
