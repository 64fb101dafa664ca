"""The memory of simulated nodes: two slots for each rank, and copies for ranks of other nodes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterator

from machine import Clock

from deadpool_run.core.state import State

_MOST_COPIES = 3
"""The copies of a rank on a node, with those that only another loss needs."""

Snapshot = tuple[int, int]
"""A version, and a token for its content. Equal tokens mean equal bytes."""

Keep = list[frozenset[str]]
"""For each rank, the nodes that keep copies."""


def kept(state: State) -> Keep:
    """Return the nodes that keep each rank's copies, as the leader sends them with the buddies."""
    either = (state.buddies, state.former_buddies)
    return [frozenset(node for each in either if each for node in each[seat.rank]) for seat in state.seats]


def free_slot(slots: list[Snapshot | None], committed: int, abandoned: Collection[int]) -> int | None:
    """Return the slot with the oldest snapshot that is not needed; None if both are needed."""
    free = [
        (-1 if slot is None else slot[0], index)
        for index, slot in enumerate(slots)
        if slot is None or slot[0] < committed or (slot[0] > committed and slot[0] in abandoned)
    ]
    return min(free)[1] if free else None


class Node:
    """One node's memory. It is lost with the node."""

    def __init__(self, name: str) -> None:
        self.name, self.alive = name, True
        self.slots: dict[int, list[Snapshot | None]] = {}
        self.copies: dict[int, dict[int, tuple[int, int]]] = {}
        """For each rank and version: the content's token, and the epoch in which it was made."""

    def held(self, rank: int) -> dict[int, int]:
        """Return the rank's snapshots in its slots: version to token."""
        return dict(slot for slot in self.slots.get(rank, ()) if slot is not None)

    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that have snapshots or copies here."""
        return tuple(sorted(self.slots.keys() | self.copies.keys()))

    def has(self, rank: int) -> dict[int, int]:
        """Return the snapshots that can be fetched from here: version to token. Copies take precedence over slots."""
        return self.held(rank) | {version: token for version, (token, _) in self.copies.get(rank, {}).items()}


class Storage:
    """The memory of all nodes and the traffic between them. Committed versions are never overwritten."""

    def __init__(self, clock: Clock, rng: random.Random, world_size: int) -> None:
        self._clock, self._rng, self._world_size = clock, rng, world_size
        self.rooms: dict[str, int] = {}
        """Nodes with little memory: the number of ranks whose copies fit."""
        self.on_refused: Callable[[str, int, bool], None] = lambda _node, _rank, _taken: None
        """Called with the node, the rank, and whether the node has accepted the copy later."""
        self._refused: set[tuple[str, int]] = set()
        self._offered: dict[tuple[str, int], int] = {}
        """For each node and rank, the epoch in which the rank's owner has last offered its transcript."""
        self.slowest_s = 0.15
        """The longest time for a copy to arrive."""
        self.nodes: dict[str, Node] = {}
        self.homes: dict[int, str] = {}
        """The node of each rank's owner."""
        self.buddies: tuple[tuple[str, ...], ...] = ()
        self.skipped = [-1] * world_size
        self.resumed = 0
        """The version from which the ranks resumed last."""
        self._newest_committed = -1
        """The newest version of this generation that was ever committed, unless the ranks resumed from an older one."""
        self.epochs: dict[str, int] = {}
        """For each node, the epoch of the last discard. Copies of older epochs are refused."""

    def join(self, name: str) -> None:
        self.nodes[name] = Node(name)

    def lose(self, name: str) -> None:
        self.nodes[name].alive = False

    def clear(self) -> None:
        """Begin a new generation: forget everything."""
        for node in self.nodes.values():
            node.slots, node.copies = {}, {}
        self.homes, self.buddies = {}, ()
        self.skipped = [-1] * self._world_size
        self.resumed, self._newest_committed = 0, -1

    def assign(self, rank: int, node: str, *, known_there: bool) -> None:
        """Move a rank to a node. Clear snapshots of its earlier stay there, unless they are known to be valid."""
        if not known_there or rank not in self.nodes[node].slots:
            self.nodes[node].slots[rank] = [None, None]
        self.homes[rank] = node

    def held(self, rank: int, node: str | None = None) -> dict[int, int]:
        return self.nodes[node or self.homes[rank]].held(rank)

    def committed(self) -> int:
        """Return the newest version that is safe for every rank: on all its buddies, or in its slots without buddies."""
        return max(set.intersection(*(set(self._safe(rank)) for rank in range(self._world_size))), default=-1)

    @contextlib.contextmanager
    def _covering(self) -> Iterator[None]:
        """Assert that what follows drops nothing that the next loss may need.

        If the job can bear the loss of a node now, it can afterwards: the other nodes have a version for all ranks that is
        not older than the committed one. Without buddies nothing is copied, and nothing is promised.
        """
        before = self.bearable()
        yield
        worse = before - self.bearable()
        assert not worse, (
            f"with {sorted(worse)}, every version from {self._newest_committed} would be lost, of some rank"
        )

    def _note_commit(self) -> None:
        self._newest_committed = max(self._newest_committed, self.committed())

    def known_committed(self) -> int:
        """Return the committed version as nodes know it: it stays so while new buddies get their copies."""
        self._note_commit()
        return self._newest_committed

    def bearable(self) -> set[str]:
        """Return the nodes whose loss the job can bear: the others have a version for all ranks, from the committed one."""
        self._note_commit()
        alive = [name for name, node in self.nodes.items() if node.alive and self.buddies]
        return {name for name in alive if self.have_all({name}, self._newest_committed)}

    def is_protected(self) -> bool:
        """Tell whether a version is safe that is not older than the last resume, nor than one that was safe: ranks may hold no older ones."""
        return self.committed() >= max(self.resumed, self.known_committed())

    def needs(self, name: str, known: Collection[str]) -> bool:
        """Tell whether the loss of this node, besides lost nodes or one other known node, would lose every whole version."""
        lost = {other for other in known if not self.nodes[other].alive}
        losses = [lost] if lost else [{other} for other in known if other != name]
        return any(self.have_all(others) and not self.have_all({name, *others}) for others in losses)

    def have_all(self, lost: set[str], oldest: int = 0) -> bool:
        """Tell whether the remaining nodes have a version for all ranks, which is not older than `oldest`."""
        living = [node for node in self.nodes.values() if node.alive and node.name not in lost]
        versions = (set().union(*(node.has(rank) for node in living)) for rank in range(self._world_size))
        return any(version >= oldest for version in set.intersection(*versions))

    def _safe(self, rank: int) -> set[int]:
        if not self.buddies:
            return set(self.held(rank)) if rank in self.homes else set()
        return set.intersection(*(set(self.nodes[buddy].copies.get(rank, {})) for buddy in self.buddies[rank]))

    def reaches(self, source: str, target: str) -> bool:  # noqa: ARG002 - for storage on a network with cuts
        return self.nodes[source].alive

    def capture(self, rank: int, snapshot: Snapshot, epoch: int, node: str) -> bool:
        """Keep a snapshot. Return False if no slot is free."""
        if self.homes.get(rank) != node:
            return False  # the rank has moved, but this worker does not know it yet
        committed, abandoned = self.known_committed(), self.abandoned()
        slots = self.nodes[self.homes[rank]].slots[rank]
        free = free_slot(slots, committed, abandoned)
        if free is not None:
            with self._covering():
                slots[free] = snapshot
            if self.skipped[rank] == snapshot[0]:
                self.skipped[rank] = -1
            self._send(rank, snapshot, epoch)
        return free is not None

    def abandoned(self) -> set[int]:
        """Return versions that can never be committed, because a rank skipped them or has only newer ones."""
        lost = set(self.skipped) - {-1}
        for rank in self.homes:
            held = self.held(rank)  # a copy on its way is not lost: only the owner can give a version up
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
        """Set the buddies, and drop copies that the coordinator does not need. Old copies stay until new ones exist."""
        self.buddies = buddies
        for rank in range(len(buddies)):
            for node in self.nodes.values():
                if node.name not in keep[rank]:
                    node.copies.pop(rank, None)
            if rank in self.homes:
                for version, token in self.held(rank).items():
                    self._send(rank, (version, token), epoch)

    def _send(self, rank: int, snapshot: Snapshot, epoch: int) -> None:
        for name in self.buddies[rank] if self.buddies else ():
            if name != self.homes[rank]:  # until new buddies are chosen, a rank may live on its buddy
                self._send_to(name, rank, snapshot, epoch, self.nodes[self.homes[rank]])

    def _send_to(self, name: str, rank: int, snapshot: Snapshot, epoch: int, source: Node) -> None:
        self._clock.after(
            self._rng.uniform(0.005, self.slowest_s),
            lambda: self._arrive(source, name, rank, snapshot, epoch),
        )

    def _arrive(self, source: Node, name: str, rank: int, snapshot: Snapshot, epoch: int) -> None:
        """Store a copy, unless its owner has dropped it."""
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
        if self._offered.get((name, rank)) != epoch:  # first comes the transcript, with a list of what the owner holds
            self._offered[name, rank] = epoch
            self._trim(there, source, rank)
            self._send_to(name, rank, snapshot, epoch, source)
            return
        there.copies.setdefault(rank, {})[version] = (token, epoch)
        self._trim(there, source, rank)

    def _trim(self, node: Node, source: Node, rank: int) -> None:
        """Drop copies of versions that the owner no longer holds, unless the next loss may need them."""
        self._note_commit()
        held, copies = source.held(rank), node.copies.get(rank, {})
        needed = [each for each in copies if each not in held and self.may_need(each)]
        needed.sort(key=lambda each: (each == self._newest_committed, each), reverse=True)
        left = {*held, *needed[: max(0, _MOST_COPIES - len(held.keys() & copies.keys()))]}
        with self._covering():
            node.copies[rank] = {each: kept for each, kept in copies.items() if each in left}

    def may_need(self, version: int) -> bool:
        """Tell whether the ranks may have to resume from this version: the one that they resumed from is not committed."""
        is_needed = self._newest_committed <= version < self.resumed
        return is_needed and (self._newest_committed in (version, -1) or version not in self.abandoned())

    def discard_above(self, epoch: int, version: int) -> None:
        """Discard newer versions, and refuse copies of older epochs that still arrive. Owners send valid ones again."""
        self.epochs = dict.fromkeys(self.nodes, epoch)
        self.resumed, self._newest_committed = version, min(self._newest_committed, version)
        for node in self.nodes.values():
            for rank, slots in node.slots.items():
                if self.homes.get(rank) != node.name:  # slots that a rank left when it moved
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
        """Bring a snapshot to a node, whose worker has or had the rank. Return False if the source does not have it."""
        token = self.nodes[source].has(rank).get(version) if self.nodes[source].alive else None
        if token is not None:
            with self._covering():
                kept = [slot for slot in self.nodes[node].slots[rank] if slot is not None and self.may_need(slot[0])]
                self.nodes[node].slots[rank] = [(version, token), min(kept, default=None)]
            if self.homes.get(rank) == node:
                self._send(rank, (version, token), max(self.epochs.values(), default=0))
        return token is not None
