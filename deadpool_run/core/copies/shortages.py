"""Nodes without memory for copies: they keep what they hold, get no further copies for a while, and are then tried again."""

from collections.abc import Iterator

from deadpool_run.core import events as ev
from deadpool_run.core.decision import Decision
from deadpool_run.core.state import Shortage, State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.ids import NodeId, Rank
from deadpool_run.text import shortened

TOGETHER_S, TOGETHER_A_RANK_S = 0.5, 100e-6
"""Refusals within this time, or so much for each rank, lead to one choice of other nodes: it looks at every rank."""
FIRST_WAIT_S = 60.0
MAX_WAIT_S = 3600.0
"""A node is tried again after a wait, which doubles with each try in vain: a try sends snapshots."""
COPIED_IN = frozenset({JobPhase.SETTING_UP, JobPhase.RUNNING})
"""Snapshots are copied in these phases."""


def is_buddy(state: State, node: NodeId, rank: Rank) -> bool:
    """Tell whether this node should hold copies of the rank now."""
    return 0 <= rank < len(state.buddies) and node in state.buddies[rank]


def is_short(state: State, node: NodeId) -> bool:
    """Tell whether the node gets no further copies now."""
    return node in state.shortages and state.shortages[node].until is not None


def keeps(state: State, node: NodeId, rank: Rank) -> bool:
    """Tell whether the node, if it holds copies of the rank, has memory for further versions."""
    return not is_short(state, node) or rank not in state.shortages[node].refused


def refused(decision: Decision, event: ev.CopyRefused) -> None:
    """Note that a node has no memory for copies of a rank; other nodes are chosen shortly."""
    state, now = decision.state, decision.now
    if not is_buddy(state, event.node, event.rank) or event.node not in state.nodes:
        return  # its report was late
    known = state.shortages.get(event.node)
    if known is None or known.until is None:
        wait_s = FIRST_WAIT_S if known is None else min(2 * known.wait_s, MAX_WAIT_S)
        known = Shortage(frozenset(), wait_s, now + wait_s)
    if event.rank not in known.refused:
        state.shortages[event.node] = Shortage(known.refused | {event.rank}, known.wait_s, known.until)
        state.refused_at = now if state.refused_at is None else state.refused_at


def taken(decision: Decision, event: ev.RefusedCopyTaken) -> None:
    """Note that a node has memory for copies of a rank again."""
    shortages = decision.state.shortages
    known = shortages.get(event.node)
    if known is not None and event.rank in known.refused:
        shortages[event.node] = Shortage(known.refused - {event.rank}, known.wait_s, known.until)


def next_deadline(state: State) -> float | None:
    """Return when `avoid` is due; None if no node lacks memory, or nothing is copied."""
    return min(_deadlines(state), default=None) if state.phase in COPIED_IN else None


def _deadlines(state: State) -> Iterator[float]:
    if state.refused_at is not None:
        yield state.refused_at + TOGETHER_S + TOGETHER_A_RANK_S * len(state.seats)
    for shortage in state.shortages.values():
        if shortage.until is not None:
            yield shortage.until


def avoid(decision: Decision) -> None:
    """Choose other nodes for refused copies. Nodes that have been avoided for long enough are tried again.

    A node that still refuses a rank, because no other node takes it, is being tried all the time.
    """
    state, now = decision.state, decision.now
    decision.changes.shortages = True
    state.refused_at = None
    for node, shortage in list(state.shortages.items()):
        if shortage.until is None or shortage.until > now:
            continue
        here = frozenset(rank for rank in shortage.refused if is_buddy(state, node, rank))
        wait_s = min(2 * shortage.wait_s, MAX_WAIT_S)
        state.shortages[node] = (
            Shortage(here, wait_s, now + wait_s) if here else Shortage(frozenset(), shortage.wait_s, None)
        )


def announce(decision: Decision, before: tuple[tuple[NodeId, ...], ...]) -> None:
    """Tell the user which refused copies go to other nodes."""
    state = decision.state
    for node, shortage in state.shortages.items():
        if shortage.until is None:
            continue
        moved = [rank for rank in sorted(shortage.refused) if node in before[rank] and not is_buddy(state, node, rank)]
        others = {other for rank in moved for other in state.buddies[rank] if other not in before[rank]}
        if others:
            ranks = f"rank{'s' * (len(moved) > 1)} {shortened([str(rank) for rank in moved])}"
            names = shortened(sorted(state.nodes[other].place.name for other in others))
            decision.announce(
                f"copies of {ranks} go to {names}", f"{state.nodes[node].place.name} has no memory for them"
            )
