"""The plan of a job in words: ranks, spares and copies of each node. Pure.

Printed before the job starts, so that a wrong number of machines or spares shows early.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby

from deadpool_run.core import placement
from deadpool_run.core.copies import buddies
from deadpool_run.core.members import Seat
from deadpool_run.core.recovery import spare_pool
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NodeRecord, State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.ids import NodeId, Rank
from deadpool_run.text import counted


def plan_lines(settings: Settings, nodes: Sequence[NodeRecord]) -> Iterator[str]:
    """Yield the lines. `nodes`: those that have arrived, in this order; the world may need more."""
    state = begun(settings, nodes)
    yield _summary(settings)
    if state.parity_groups:
        most = max(map(len, state.parity_groups))
        yield f"up to {most} ranks of different nodes share a parity on another node"
    elif state.buddies:
        yield f"each rank's snapshots are copied to {counted(len(state.buddies[0]), 'other node')}"
    elif len(nodes) >= settings.nodes:  # known only when enough nodes have arrived
        yield "snapshots are not copied to other nodes: a lost node loses the state of its ranks"
    width = max((len(node.node) for node in nodes), default=0)
    for node in placement.in_order(nodes):
        yield f"{node.node:<{width}}  {_purpose(settings, state, node)}{_copies(state, node)}"
    if (missing := settings.nodes - len(nodes)) > 0:
        yield f"waiting for {counted(missing, 'more node')}: the world starts with {settings.nodes}"


def begun(settings: Settings, nodes: Sequence[NodeRecord]) -> State:
    """Return the state of a world that starts on these nodes: nodes, and as far as they suffice seats and buddies."""
    state = State(
        phase=JobPhase.SETTING_UP,
        capture_interval=settings.capture_interval,
        seats=tuple(_seats(settings, placement.in_order(nodes))),
        nodes={node.node: node for node in nodes},
        arrivals=len(nodes),
    )
    if all(seat.node is not None for seat in state.seats):
        state.buddies, state.parity_groups = buddies.arrange(settings, state)
    return state


def _seats(settings: Settings, order: Sequence[NodeRecord]) -> Iterator[Seat]:
    for rank in range(settings.world_size):
        at, local_rank = divmod(rank, settings.ranks_per_node)
        node = order[at].node if at < len(order) else None
        yield Seat(Rank(rank), node=node, local_rank=0 if node is None else local_rank)


def _summary(settings: Settings) -> str:
    each = "" if settings.nodes == 1 else f", {settings.ranks_per_node} on each of {settings.nodes} nodes"
    asked = ((settings.spare_nodes, "node"), (settings.spares, "worker"))
    spares = [counted(number, what) for number, what in asked if number]
    return f"{counted(settings.world_size, 'rank')}{each}; spares: {' and '.join(spares) or 'none'}"


def _purpose(settings: Settings, state: State, node: NodeRecord) -> str:
    ranks = sorted(state.ranks_on(node.node))
    if not ranks:
        return "spare"
    spares = spare_pool.capacity(settings, state, node.node) - settings.ranks_per_node
    return f"{_ranks(ranks)} and {counted(spares, 'spare worker')}" if spares > 0 else _ranks(ranks)


def _copies(state: State, node: NodeRecord) -> str:
    """Return the holders of the copies or parities of the node's ranks; ranks with the same holders are grouped."""
    if not state.buddies:
        return ""
    homes: dict[tuple[NodeId, ...], list[Rank]] = {}
    for rank in sorted(state.ranks_on(node.node)):
        homes.setdefault(state.buddies[rank], []).append(rank)
    kind = "parities" if state.parity_groups else "copies"
    if len(homes) == 1:
        return f"; {kind} on {', '.join(next(iter(homes)))}"
    return "".join(f"; {kind} of {_ranks(ranks)} on {', '.join(holders)}" for holders, ranks in homes.items())


def numbers(found: Sequence[int]) -> str:
    """Return `3`, `0-3` or `0-1, 4` for ascending numbers."""
    stretches = [
        [number for _, number in stretch] for _, stretch in groupby(enumerate(found), lambda each: each[1] - each[0])
    ]
    words = (f"{stretch[0]}-{stretch[-1]}" if len(stretch) > 1 else str(stretch[0]) for stretch in stretches)
    return ", ".join(words)


def _ranks(ranks: Sequence[Rank]) -> str:
    """Return `rank 3`, `ranks 0-3` or `ranks 0-1, 4` for ascending numbers."""
    return f"rank{'s' if len(ranks) > 1 else ''} {numbers(ranks)}"
