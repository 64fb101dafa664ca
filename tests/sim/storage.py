"""The memory of simulated nodes: two slots for each of their ranks, and copies for ranks of other nodes."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection

from machine import Clock

from deadpool_run.core.state import State

Snapshot = tuple[int, int]
"""A version, and a token of its content: the same token is the same bytes."""

Keep = list[frozenset[str]]
"""Per rank, the nodes that keep copies."""


def kept(state: State) -> Keep:
    """Return what the leader tells the nodes to keep, when it tells them of buddies."""
    either = (state.buddies, state.former_buddies)
    return [frozenset(node for each in either if each for node in each[seat.rank]) for seat in state.seats]


def free_slot(slots: list[Snapshot | None], committed: int, abandoned: Collection[int]) -> int | None:
    """Return the slot with the oldest snapshot that is not needed; None if both are."""
    free = [
        (-1 if slot is None else slot[0], index)
        for index, slot in enumerate(slots)
        if slot is None or slot[0] < committed or (slot[0] > committed and slot[0] in abandoned)
    ]
    return min(free)[1] if free else None


class Node:
    """One node's memory. It is gone with the node."""

    def __init__(self, name: str) -> None:
        self.name, self.alive = name, True
        self.slots: dict[int, list[Snapshot | None]] = {}
        self.copies: dict[int, dict[int, tuple[int, int]]] = {}
        """Per rank and version: the content's token, and the epoch that it was made in."""

    def held(self, rank: int) -> dict[int, int]:
        """Return the rank's own snapshots here: version to token."""
        return dict(slot for slot in self.slots.get(rank, ()) if slot is not None)

    def ranks(self) -> tuple[int, ...]:
        """Return the ranks of which there is anything."""
        return tuple(sorted(self.slots.keys() | self.copies.keys()))

    def has(self, rank: int) -> dict[int, int]:
        """Return all that could be fetched from here. What was sent here is newer than what was left here."""
        return self.held(rank) | {version: token for version, (token, _) in self.copies.get(rank, {}).items()}


class Storage:
    """All nodes' memory, under the rule that keeps what is committed, with the traffic between them."""

    def __init__(self, clock: Clock, rng: random.Random, world_size: int) -> None:
        self._clock, self._rng, self._world_size = clock, rng, world_size
        self.rooms: dict[str, int] = {}
        """Nodes that have memory for copies of so many ranks only."""
        self.on_refused: Callable[[str, int, bool], None] = lambda _node, _rank, _taken: None
        """Called with the node, the rank, and whether the node has taken the copy after all."""
        self._refused: set[tuple[str, int]] = set()
        self.slowest_s = 0.15
        """A copy arrives within this."""
        self.nodes: dict[str, Node] = {}
        self.homes: dict[int, str] = {}
        """The node of each rank's owner."""
        self.buddies: tuple[tuple[str, ...], ...] = ()
        self.skipped = [-1] * world_size
        self.resumed = 0
        """The version that the ranks resumed from last."""
        self.epochs: dict[str, int] = {}
        """Per node, the epoch of the last discard: what was made before and comes after it is refused."""

    def join(self, name: str) -> None:
        self.nodes[name] = Node(name)

    def lose(self, name: str) -> None:
        self.nodes[name].alive = False

    def clear(self) -> None:
        """The world begins from the top."""
        for node in self.nodes.values():
            node.slots, node.copies = {}, {}
        self.homes, self.buddies = {}, ()
        self.skipped = [-1] * self._world_size
        self.resumed = 0

    def assign(self, rank: int, node: str, *, known_there: bool) -> None:
        """A rank that comes to a node is not to find what it left there in an earlier stay, unless that is what counts."""
        if not known_there or rank not in self.nodes[node].slots:
            self.nodes[node].slots[rank] = [None, None]
        self.homes[rank] = node

    def held(self, rank: int, node: str | None = None) -> dict[int, int]:
        return self.nodes[node or self.homes[rank]].held(rank)

    def committed(self) -> int:
        """Return the newest version that every rank has, or that all of its buddies have."""
        return max(set.intersection(*(set(self._safe(rank)) for rank in range(self._world_size))), default=-1)

    def is_protected(self) -> bool:
        """Tell whether the buddies have a version that the ranks hold as well: replaced ones have none from before they resumed."""
        return self.committed() >= self.resumed

    def needs(self, name: str, known: Collection[str]) -> bool:
        """Tell whether a version for all ranks would be lost with this node, or with it and one of the others that are known."""
        lost = {other for other in known if not self.nodes[other].alive}
        losses = [lost] if lost else [{other} for other in known if other != name]
        return any(self._have_all(others) and not self._have_all({name, *others}) for others in losses)

    def _have_all(self, lost: set[str]) -> bool:
        """Tell whether the other nodes have some version of every rank."""
        living = [node for node in self.nodes.values() if node.alive and node.name not in lost]
        versions = (set().union(*(node.has(rank) for node in living)) for rank in range(self._world_size))
        return bool(set.intersection(*versions))

    def _safe(self, rank: int) -> set[int]:
        if not self.buddies:
            return set(self.held(rank)) if rank in self.homes else set()
        return set.intersection(*(set(self.nodes[buddy].copies.get(rank, {})) for buddy in self.buddies[rank]))

    def reaches(self, source: str, target: str) -> bool:  # noqa: ARG002 - for storage on a network that can be cut
        return self.nodes[source].alive

    def capture(self, rank: int, snapshot: Snapshot, epoch: int, node: str) -> bool:
        """Keep a snapshot; tell whether there was a free slot."""
        if self.homes.get(rank) != node:
            return False  # the rank has moved on, and this worker does not know yet
        committed, abandoned = self.committed(), self.abandoned()
        slots = self.nodes[self.homes[rank]].slots[rank]
        free = free_slot(slots, committed, abandoned)
        if free is not None:
            slots[free] = snapshot
            if self.skipped[rank] == snapshot[0]:
                self.skipped[rank] = -1
            self._send(rank, snapshot, epoch)
        return free is not None

    def abandoned(self) -> set[int]:
        """Return versions that can never be committed: some rank skipped them, or has gone on without them."""
        lost = set(self.skipped) - {-1}
        for rank in self.homes:
            held = self.held(rank)  # what is on its way to a buddy is not lost: only the owner can give a version up
            newest = max((*held, self.skipped[rank]))
            lost |= {version for version in range(newest) if version not in held}
        return lost

    def skip(self, rank: int, version: int) -> None:
        self.skipped[rank] = version

    def empty_above(self, rank: int, version: int, node: str) -> None:
        slots = self.nodes[node].slots
        slots[rank] = [slot if slot is None or slot[0] <= version else None for slot in slots[rank]]
        if self.homes.get(rank) == node and self.skipped[rank] > version:
            self.skipped[rank] = -1

    # --- between nodes -------------------------------------------------------------------------------------------

    def set_buddies(self, buddies: tuple[tuple[str, ...], ...], keep: Keep, epoch: int) -> None:
        """Former copies are kept as long as the coordinator counts on them: the new holders have nothing yet."""
        self.buddies = buddies
        for rank in range(len(buddies)):
            for node in self.nodes.values():
                if node.name not in keep[rank]:
                    node.copies.pop(rank, None)
            if rank in self.homes:
                for version, token in self.held(rank).items():
                    self._send(rank, (version, token), epoch)

    def _send(self, rank: int, snapshot: Snapshot, epoch: int) -> None:
        source = self.nodes[self.homes[rank]]
        for name in self.buddies[rank] if self.buddies else ():
            if name == source.name:
                continue  # until others are chosen, a rank may live where its copies are
            self._clock.after(
                self._rng.uniform(0.005, self.slowest_s),
                lambda name=name: self._arrive(source, name, rank, snapshot, epoch),
            )

    def _arrive(self, source: Node, name: str, rank: int, snapshot: Snapshot, epoch: int) -> None:
        """A copy has come, unless its owner has dropped it meanwhile; with it comes what its owner holds now."""
        there, (version, token) = self.nodes[name], snapshot
        if not (source.alive and there.alive) or source.held(rank).get(version) != token:
            return
        if epoch < self.epochs.get(name, 0):
            return
        if rank not in there.copies and len(there.copies) >= self.rooms.get(name, self._world_size):
            if name in self.buddies[rank]:
                self._refused.add((name, rank))
                self.on_refused(name, rank, False)
                self._clock.after(0.5, lambda: self._arrive(source, name, rank, snapshot, epoch))
            return
        if (name, rank) in self._refused:
            self._refused.remove((name, rank))
            self.on_refused(name, rank, True)
        copies = there.copies.setdefault(rank, {})
        copies[version] = (token, epoch)
        there.copies[rank] = {each: kept for each, kept in copies.items() if each in source.held(rank)}

    def discard_above(self, epoch: int, version: int) -> None:
        """Refuse what is still on its way from before; whoever holds what was refused sends it anew."""
        self.epochs = dict.fromkeys(self.nodes, epoch)
        self.resumed = version
        for node in self.nodes.values():
            for rank, slots in node.slots.items():
                if self.homes.get(rank) != node.name:  # what a rank left behind when it moved on
                    node.slots[rank] = [slot if slot is None or slot[0] <= version else None for slot in slots]
            for rank, copies in node.copies.items():
                node.copies[rank] = {
                    each: (token, made) for each, (token, made) in copies.items() if each <= version or made >= epoch
                }

        for rank in self.homes:
            for held, token in self.held(rank).items():
                if held <= version:
                    self._send(rank, (held, token), epoch)

    def fetch(self, source: str, rank: int, version: int, node: str) -> bool:
        """Bring a snapshot to the node of a worker that had the rank, and may have lost it; tell whether it could be had."""
        token = self.nodes[source].has(rank).get(version) if self.nodes[source].alive else None
        if token is not None:
            self.nodes[node].slots[rank] = [(version, token), None]
            if self.homes.get(rank) == node:
                self._send(rank, (version, token), max(self.epochs.values(), default=0))
        return token is not None
