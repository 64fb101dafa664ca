"""Which worker takes which rank: in node order when the world begins, nearest first when a rank is lost. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

from deadpool_run.core.lifecycle import MemberPhase
from deadpool_run.core.membership import Member, Node, Seat, State
from deadpool_run.core.settings import Settings
from deadpool_run.ids import NodeId, Rank

SPARES_WAIT_S = 10.0
"""Once there are nodes enough for the world, those in reserve are waited for so long after the last that joined."""


@dataclass(frozen=True, slots=True)
class Seating:
    """A rank for a worker."""

    rank: Rank
    member: Member
    local_rank: int


def in_order(state: State) -> list[Node]:
    """Return the living nodes in the order in which they are given ranks."""
    return sorted(
        state.nodes.values(),
        key=lambda node: (node.place.order is None, node.place.order or 0, node.arrival),
    )


def spares_due(settings: Settings, state: State) -> float | None:
    """Return when a world with nodes enough begins without waiting for those in reserve; None if it has not enough."""
    if not settings.nodes <= len(state.nodes) < settings.nodes + settings.spare_nodes or state.generation > 0:
        return None
    return state.joined_at + SPARES_WAIT_S


def world(settings: Settings, state: State) -> list[Seating]:
    """Return a worker for every rank; nothing if that cannot be done yet."""
    if len(state.nodes) < settings.nodes:
        return []
    if spares_due(settings, state) is not None and not state.spares_waited_for:
        return []
    if state.count(MemberPhase.READY) < settings.world_size:
        return []
    seatings = []
    ready_on: dict[NodeId, list[Member]] = {}
    for member in state.in_phase(MemberPhase.READY):
        ready_on.setdefault(member.node, []).append(member)
    for index, node in enumerate(in_order(state)[: settings.nodes]):
        ready = ready_on.get(node.node, [])
        if len(ready) < settings.ranks_per_node:
            return []
        first = index * settings.ranks_per_node
        seatings += [Seating(Rank(first + at), ready[at], at) for at in range(settings.ranks_per_node)]
    return seatings


def replacements(state: State, vacant: list[Seat]) -> list[Seating]:
    """Return workers for vacant ranks, as far as there are any now."""
    ready = state.in_phase(MemberPhase.READY)
    seatings: list[Seating] = []
    alone: list[Seat] = []
    for home, seats in _by_home(vacant):
        together = None if home in state.nodes or len(seats) < 2 else _room(state, ready, seats, seatings)
        if together is None:
            alone += seats
            continue
        for seat, member in zip(seats, together, strict=False):
            ready.remove(member)
            seatings.append(Seating(seat.rank, member, _local_rank(state, seat, member.node, seatings)))
    for seat in alone:
        if ready:
            member = min(ready, key=lambda each: (_distance(state, seat, each.node), each.worker))
            ready.remove(member)
            seatings.append(Seating(seat.rank, member, _local_rank(state, seat, member.node, seatings)))
    return seatings


def _by_home(vacant: list[Seat]) -> Iterator[tuple[NodeId | None, list[Seat]]]:
    for home in dict.fromkeys(seat.node for seat in vacant):
        yield home, [seat for seat in vacant if seat.node == home]


def _room(state: State, ready: list[Member], seats: list[Seat], taken: list[Seating]) -> list[Member] | None:
    """Return workers of one node for all of these ranks, nearest first; None if no node has as many."""
    busy = {seating.member.node for seating in taken}
    fitting = []
    for node in state.nodes.values():
        free = [member for member in ready if member.node == node.node]
        if len(free) >= len(seats):
            held = sum(seat.node == node.node for seat in state.seats)
            fitting.append((_distance(state, seats[0], node.node), node.node in busy, held, node.arrival, free))
    return min(fitting, key=lambda each: each[:4])[4] if fitting else None


def _distance(state: State, seat: Seat, node: NodeId) -> int:
    """Return 0 for the rank's own node, 1 for its leaf, 2 for any other."""
    if seat.node == node:
        return 0
    home, there = state.leaves.get(seat.node), state.nodes[node].place.leaf
    return 1 if home and home == there else 2


def _local_rank(state: State, seat: Seat, node: NodeId, seatings: list[Seating]) -> int:
    """Return the rank's place on the node: the one that it had, if it is free there."""
    if seat.node == node:
        return seat.local_rank
    taken = {other.local_rank for other in state.seats if other.node == node and other.rank != seat.rank}
    taken |= {seating.local_rank for seating in seatings if seating.member.node == node}
    if seat.local_rank not in taken:
        return seat.local_rank
    return min(set(range(len(taken) + 1)) - taken)
