"""The pool of parked workers: kept at its size, and given ranks."""

from deadpool_run.core import ending
from deadpool_run.core.lifecycle import JobPhase, MemberPhase
from deadpool_run.core.membership import Member, State
from deadpool_run.core.settings import Settings
from deadpool_run.core.tallies import LEAVING
from deadpool_run.core.turn import Turn
from deadpool_run.ids import NodeId

CRASHES = 5
"""So many parked workers may die within `CRASH_WINDOW_S` and be started again at once."""
CRASH_WINDOW_S = 60.0
_HEALED_IN = frozenset({JobPhase.STARTING, JobPhase.UNPROTECTED, JobPhase.RUNNING, JobPhase.REPAIRING})


def heal(turn: Turn) -> None:
    """Start what is missing to world size and spares. A pool that crashes in a loop waits, or ends a job that needs it."""
    state = turn.state
    if state.phase not in _HEALED_IN or _is_as_it_was(turn):
        return
    missing = _missing(turn.settings, state)
    if not missing:
        return
    if _crashed_lately(state, turn.now) >= CRASHES:
        if _needs_worker(state):
            ending.stop(
                turn, 1, f"{CRASHES} workers died before they were given a rank; see their output for the cause"
            )
        return
    for node in missing:
        turn.start_worker(node)


def _is_as_it_was(turn: Turn) -> bool:
    """Tell whether nothing has changed since the pool was healed, at the end of the last decision, that it depends on."""
    before, state = turn.before, turn.state
    return (
        before.phase in _HEALED_IN
        and len(state.crashes) < CRASHES
        and state.nodes is before.nodes
        and state.member_tally.alive is before.member_tally.alive
        and state.seat_tally.done == before.seat_tally.done
    )


def parked_died(turn: Turn, member: Member, how: str) -> None:
    """Note the death of a worker that held no rank."""
    if member.phase in LEAVING or turn.state.phase not in _HEALED_IN:
        return
    turn.set(crashes=(*turn.state.crashes, turn.now)[-CRASHES:])
    turn.announce(f"spare worker {member.worker} died", how)


def is_exhausted(settings: Settings, state: State) -> bool:
    """Tell whether a rank is vacant and no worker is there, or can be started, to take it."""
    if not state.seat_tally.vacant or state.count(MemberPhase.STARTING, MemberPhase.READY, MemberPhase.ENDING):
        return False
    return not _missing(settings, state)


def heal_deadline(settings: Settings, state: State) -> float | None:
    """Return when a pool that crashed in a loop is healed again."""
    if state.phase not in _HEALED_IN or len(state.crashes) < CRASHES or not _missing(settings, state):
        return None
    return state.crashes[0] + CRASH_WINDOW_S


def capacity(settings: Settings, state: State, node: NodeId) -> int:
    """Return how many workers the node is to have: one for each of its places, and its part of the spares."""
    return _capacity(settings, state, node, list(state.nodes).index(node))


def _capacity(settings: Settings, state: State, node: NodeId, at: int) -> int:
    """Return it for the node that is at this place in order of arrival."""
    first, rest = divmod(settings.spares, settings.nodes)
    spares = first + (at < rest) if at < settings.nodes else 0
    done = sum(seat.done and seat.node == node for seat in state.seats) if state.seat_tally.done else 0
    return settings.ranks_per_node + spares - done


def _missing(settings: Settings, state: State) -> list[NodeId]:
    """Return where workers are to be started, a node for each."""
    missing: list[NodeId] = []
    alive = state.member_tally.alive
    for at, node in enumerate(state.nodes):
        missing += [node] * (_capacity(settings, state, node, at) - alive.get(node, 0))
    return missing


def _crashed_lately(state: State, now: float) -> int:
    return sum(now < at + CRASH_WINDOW_S for at in state.crashes)


def _needs_worker(state: State) -> bool:
    """Tell whether a rank waits for a worker that nobody is about to be."""
    if state.phase is JobPhase.STARTING:
        return True
    return state.phase is JobPhase.REPAIRING and len(state.vacant()) > state.count(MemberPhase.STARTING)
