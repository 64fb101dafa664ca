"""Assignment of ranks to workers: in node order when the world begins, else to the worker nearest to the lost one."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from deadpool_run.core import places
from deadpool_run.core.members import Member, Seat
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NodeRecord, State
from deadpool_run.core.transitions import MemberPhase
from deadpool_run.ids import NodeId, Rank

_FAILS = 3
"""The distance that a failing place adds: any other place is nearer."""
SPARES_WAIT_S = 10.0
"""How long a world with enough nodes waits for the spare ones, after the last node joined."""


@dataclass(frozen=True, slots=True)
class Seating:
    """A rank for a worker."""

    rank: Rank
    member: Member
    local_rank: int


def in_order(nodes: Iterable[NodeRecord]) -> list[NodeRecord]:
    """Return the living nodes in the order in which they are given ranks."""
    return sorted(nodes, key=lambda node: (node.place.order is None, node.place.order or 0, node.arrival))


def spares_due(settings: Settings, state: State) -> float | None:
    """Return when a world with enough nodes begins without spare nodes; None if it does not wait for these."""
    waits = state.generation == 0 and not state.spares_waited_for
    is_due = waits and settings.nodes <= len(state.nodes) < settings.nodes + settings.spare_nodes
    return state.joined_at + SPARES_WAIT_S if is_due else None


def world(settings: Settings, state: State) -> list[Seating]:
    """Return a worker for every rank; an empty list while workers are missing."""
    if len(state.nodes) < settings.nodes or spares_due(settings, state) is not None:
        return []
    if state.count(MemberPhase.READY) < settings.world_size:
        return []
    if _is_still_incomplete(settings, state):
        return []
    seatings = []
    open_nodes = (node for node in state.nodes.values() if node.node not in state.closed)
    good_first = sorted(in_order(open_nodes), key=lambda node: places.has_bad(state, node.node))
    for index, node in enumerate(in_order(good_first[: settings.nodes])):
        ready = _ready_on(state, node.node)
        if len(ready) < settings.ranks_per_node:
            state.incomplete = node.node, _what_chooses(state, node.node)
            return []
        first = index * settings.ranks_per_node
        seatings += [
            Seating(Rank(first + at), ready[at], place)
            for at, place in enumerate(_first_places(state, node, settings.ranks_per_node))
        ]
    return seatings


def _is_still_incomplete(settings: Settings, state: State) -> bool:
    """Return whether the world waits for the same node as at the last event. With thousands of nodes, a search takes long."""
    if state.incomplete is None:
        return False
    node, chosen_by = state.incomplete
    return chosen_by == _what_chooses(state, node) and len(_ready_on(state, node)) < settings.ranks_per_node


def _what_chooses(state: State, node: NodeId) -> object:
    """Return what decides whether the node is among the first ones: nodes come and go, are closed, or fail."""
    failing = len(state.failures), len(state.crashes), len(state.never_ready), places.has_bad(state, node)
    return state.joined_at, len(state.nodes), state.closed, failing


def _ready_on(state: State, node: NodeId) -> list[Member]:
    return [member for member in state.on_node(node) if member.phase is MemberPhase.READY]


def _first_places(state: State, node: NodeRecord, count: int) -> list[int]:
    """Return the places of a node's ranks when the world begins: the first ones that are not bad or a spare's."""
    spares = {member.place for member in state.on_node(node.node)}
    every = range(max(count, node.place.devices))
    return sorted(sorted(every, key=lambda at: (places.is_bad(state, node.node, at), at in spares))[:count])


def free_local_rank(state: State, seat: Seat, node: NodeId, taken: Iterable[int] = ()) -> int:
    """Return the rank's place on a node: the number that it had, if no other rank there has it and it is not `taken`.

    On a node with GPUs a spare's is not free either, and one that is bad is the last choice.
    """
    others = {state.seats[rank].local_rank for rank in state.ranks_on(node) if rank != seat.rank}.union(taken)
    if devices := _free_devices(state, node, others):
        return min(devices, key=lambda at: (places.is_bad(state, node, at), at != seat.local_rank, at))
    return seat.local_rank if seat.local_rank not in others else min(set(range(len(others) + 1)) - others)


def good_devices(state: State, node: NodeId) -> set[int]:
    """Return the GPUs of a node that nobody uses and that are not bad."""
    held = {state.seats[rank].local_rank for rank in state.ranks_on(node)}
    return {at for at in _free_devices(state, node, held) if not places.is_bad(state, node, at)}


def _free_devices(state: State, node: NodeId, held: Collection[int]) -> set[int]:
    """Return the GPUs that no rank or spare of the node uses; empty on a node without GPUs."""
    if node not in state.nodes or not (devices := state.nodes[node].place.devices):
        return set()
    spares = {member.place for member in state.on_node(node) if member.rank is None}
    return set(range(devices)).difference(held, spares)


def replacements(state: State, vacant: list[Seat]) -> list[Seating]:
    """Return workers for vacant ranks. Ranks for which no worker is ready are left out."""
    ready = _Ready(state)
    homes: dict[NodeId | None, list[Seat]] = {}
    for seat in vacant:
        homes.setdefault(seat.node, []).append(seat)
    alone: list[Seat] = []
    for home, seats in homes.items():
        stays = home in state.nodes and home not in state.closed
        together = None if stays or len(seats) < 2 else ready.room(seats)
        if together is None:
            alone += seats
            continue
        rehearsed = {member.prepared for member in together}
        for seat in sorted(seats, key=lambda seat: seat.rank not in rehearsed):
            member = _first(together, seat)
            together.remove(member)
            ready.take(seat, member)
    for seat in alone:
        if (nearest := ready.nearest(seat)) is not None:
            ready.take(seat, nearest)
    return ready.taken


class _Ready:
    """The workers that are ready, by node, and those that were given a rank in this decision."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._free: dict[NodeId, list[Member]] = {}
        """Oldest first; nodes without any are left out."""
        for member in state.in_phase(MemberPhase.READY):
            if member.node in state.closed:
                continue
            self._free.setdefault(member.node, []).append(member)
        self.taken: list[Seating] = []
        self._local_ranks: dict[NodeId, set[int]] = {}
        """The places that this decision has taken, by node."""

    def take(self, seat: Seat, member: Member) -> None:
        """Give the worker the rank."""
        local_rank = self._local_rank(seat, member)
        self.taken.append(Seating(seat.rank, member, local_rank))
        self._local_ranks.setdefault(member.node, set()).add(local_rank)
        free = self._free[member.node]
        free.remove(member)
        if not free:
            del self._free[member.node]

    def room(self, seats: list[Seat]) -> list[Member] | None:
        """Return the workers of the best node that has one for each rank; None if there is none."""
        fitting = [node for node, free in self._free.items() if len(free) >= len(seats)]
        best = min(fitting, key=lambda node: self._preference(seats, node), default=None)
        return None if best is None else list(self._free[best])

    def nearest(self, seat: Seat) -> Member | None:
        """Return the nearest worker for the rank, of several the oldest; None if there is none."""
        firsts = [_first(free, seat) for free in self._free.values()]
        return min(
            firsts,
            key=lambda each: (self._distance(seat, each), each.prepared != seat.rank, each.worker),
            default=None,
        )

    def _preference(self, seats: list[Seat], node: NodeId) -> tuple[int, int, bool, int, int]:
        """Return the sort key of a node for ranks that lived together: the least is best."""
        held = len(self._state.ranks_on(node))
        is_busy = node in self._local_ranks
        rehearsed = {seat.rank for seat in seats} & {member.prepared for member in self._free[node]}
        return (
            self._distance(seats[0], _first(self._free[node], seats[0])),
            -len(rehearsed),
            is_busy,
            held,
            self._state.nodes[node].arrival,
        )

    def _distance(self, seat: Seat, member: Member) -> int:
        """Return 0 for the rank's own node, 1 for its failure domain, 2 for any other; 3 more for a failing place."""
        node = member.node
        fails = _FAILS * places.is_avoided(self._state, node, self._local_rank(seat, member))
        if seat.node == node:
            return fails
        home, there = self._state.failure_domains.get(seat.node), self._state.nodes[node].place.failure_domain
        return fails + (1 if home and home == there else 2)

    def _local_rank(self, seat: Seat, member: Member) -> int:
        """Return the rank's place with this worker; without GPUs, on its own node the one that it had."""
        if member.place is not None:
            return member.place
        node = member.node
        if seat.node == node and not self._state.nodes[node].place.devices:
            return seat.local_rank
        return free_local_rank(self._state, seat, node, self._local_ranks.get(node, ()))


def _first(free: list[Member], seat: Seat) -> Member:
    """Return a worker that rehearsed the rank; else one that rehearsed nothing; else any."""
    return min(free, key=lambda each: (each.prepared != seat.rank, each.prepared is not None, each.worker))
