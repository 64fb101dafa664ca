"""Places where workers fail: a rank's place on a node, which is usually one GPU, and nodes whose spares die.

The next attempt uses another place, if it can. Failures are forgotten once the place or the node has proved good.
"""

from collections.abc import Iterable, Iterator

from deadpool_run.core.state import State
from deadpool_run.ids import NodeId

BAD_AFTER = 2
"""A place is bad after this many failures, if no step was completed by every rank between them."""
CRASHES = 5
"""A node gets no new workers for a while after this many of its parked workers died within `CRASH_WINDOW_S`."""
CRASH_WINDOW_S = 60.0
_FOR_GOOD = 1 << 20
"""Failures that no completed step makes up for."""
_BAD_PLACES = 2
"""A node with this many bad places is bad as a whole."""
NEVER_READY = 3
"""A node counts as crashing after this many workers in a row were never ready."""


def note_failure(state: State, node: NodeId, local_rank: int) -> None:
    """Note that a rank's worker failed there, by no fault of others."""
    on_node = state.failures.setdefault(node, {})
    on_node[local_rank] = on_node.get(local_rank, 0) + 1


def condemn(state: State, node: NodeId, local_rank: int) -> None:
    """Note that a process that does not end occupies the place."""
    on_node = state.failures.setdefault(node, {})
    on_node[local_rank] = max(on_node.get(local_rank, 0), BAD_AFTER)


def note_device_failed(state: State, node: NodeId, local_rank: int) -> bool:
    """Note that the place's GPU failed, for good: its rank may still complete a step. False if that is known."""
    on_node = state.failures.setdefault(node, {})
    is_new = on_node.get(local_rank, 0) < _FOR_GOOD
    on_node[local_rank] = _FOR_GOOD
    return is_new


def note_steps(state: State) -> None:
    """Note that every rank has completed a step where it is."""
    state.never_ready.clear()
    for seat in state.seats if state.failures else ():
        on_node = {} if seat.node is None else state.failures.get(seat.node, {})
        if on_node.get(seat.local_rank, 0) < _FOR_GOOD:
            on_node.pop(seat.local_rank, None)


def note_crash(state: State, node: NodeId, now: float) -> None:
    """Note the death of a worker without a rank."""
    state.crashes[node] = (*state.crashes.get(node, ()), now)[-CRASHES:]


def note_never_ready(state: State, node: NodeId) -> None:
    """Note a worker that had to be ended because it was never ready."""
    state.never_ready[node] = state.never_ready.get(node, 0) + 1


def forget(state: State, nodes: Iterable[NodeId]) -> None:
    """Forget lost nodes."""
    for node in nodes:
        state.crashes.pop(node, None)
        state.never_ready.pop(node, None)
        state.failures.pop(node, None)


def is_bad(state: State, node: NodeId, local_rank: int) -> bool:
    """Tell whether any other place is better."""
    return state.failures.get(node, {}).get(local_rank, 0) >= BAD_AFTER


def has_bad(state: State, node: NodeId) -> bool:
    """Tell whether a place of the node is bad, or its workers die, so that a new world avoids it."""
    return is_crashing(state, node) or _bad_places(state, node) > 0


def is_crashing(state: State, node: NodeId, now: float | None = None) -> bool:
    """Tell whether the node's workers die before they get a rank: now, or (None) when the last one died."""
    if state.never_ready.get(node, 0) >= NEVER_READY:
        return True
    crashes = state.crashes.get(node, ())
    return len(crashes) == CRASHES and (crashes[-1] if now is None else now) < crashes[0] + CRASH_WINDOW_S


def is_avoided(state: State, node: NodeId, local_rank: int) -> bool:
    """Tell whether a rank avoids the place: it is bad, two others of the node are, or the node's workers die."""
    return is_bad(state, node, local_rank) or is_crashing(state, node) or _bad_places(state, node) >= _BAD_PLACES


def are_limited(state: State) -> bool:
    """Tell whether some node may get no new workers."""
    if not state.crashes:  # as in most jobs, and every event asks
        return bool(state.never_ready)
    return bool(state.never_ready) or any(len(times) == CRASHES for times in state.crashes.values())


def calm_at(state: State) -> Iterator[tuple[NodeId, float]]:
    """Yield the nodes that wait for new workers after their last ones died, and when they get them."""
    for node, times in state.crashes.items():
        if len(times) == CRASHES and state.never_ready.get(node, 0) < NEVER_READY:
            yield node, times[0] + CRASH_WINDOW_S


def _bad_places(state: State, node: NodeId) -> int:
    return sum(count >= BAD_AFTER for count in state.failures.get(node, {}).values())
