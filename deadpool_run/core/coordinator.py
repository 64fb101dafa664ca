"""The one door to the coordinator's state: every change of it goes through `step`.

Deterministic: the same state, event and time lead to the same state and orders. It never waits, reads a clock or does I/O.
"""

from typing import assert_never

from deadpool_run.core import events as ev
from deadpool_run.core import nodes, processes, reports, timers
from deadpool_run.core.decision import Decision
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event
from deadpool_run.core.invariants import check_invariants
from deadpool_run.core.leadership import takeover
from deadpool_run.core.members import vacant_seats
from deadpool_run.core.recovery import repair, restart, shutdown, spare_pool
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State, all_done
from deadpool_run.core.transitions import JobPhase, MemberPhase

__all__ = ["check_invariants", "new_state", "next_deadline", "step"]


def new_state(settings: Settings) -> State:
    """Return the state of a job that nothing has happened to."""
    return State(
        phase=JobPhase.NEW,
        capture_interval=settings.capture_interval,
        seats=vacant_seats(settings.world_size),
    )


def step(settings: Settings, state: State, event: Event, now: float) -> tuple[Effect, ...]:
    """Change the state by one event, and return the orders to perform, in this order.

    `now` is in seconds of one monotonic clock and never falls. Stale or irrelevant events change nothing. A step that
    raises leaves the state void: no further step takes it.
    """
    assert not state.is_void, "an earlier step failed half-way"
    state.is_void = True
    decision = Decision(settings, state, now)
    for fact in takeover.sift(decision, event):
        if decision.state.phase is not JobPhase.STOPPED:
            _hear(decision, fact)
            _advance(decision)
    state.is_void = False
    return tuple(decision.effects)


def next_deadline(settings: Settings, state: State) -> float | None:
    """Return when `TimeAdvanced` is to be told, if nothing else happens before; None if time changes nothing."""
    return timers.earliest(settings, state)


def _hear(decision: Decision, event: Event) -> None:
    if isinstance(event, processes.ProcessNews):
        processes.hear(decision, event)
        return
    if isinstance(event, reports.Word):
        reports.hear(decision, event)
        return
    if isinstance(event, nodes.NodeNews):
        nodes.hear(decision, event)
        return
    match event:
        case ev.JobSubmitted():
            restart.submitted(decision, event)
        case ev.StopRequested():
            shutdown.stop_requested(decision, event)
        case ev.KillRequested():
            processes.kill_requested(decision, event)
        case ev.TimeAdvanced():
            timers.advance(decision)
        case ev.CoordinatorMoved() | ev.NodeResynced():
            takeover.hear(decision, event)
        case _:
            assert_never(event)


def _advance(decision: Decision) -> None:
    """Decide all that follows from the facts, whichever of them came last. Each phase is left at most once."""
    if decision.state.phase is JobPhase.REPAIRING:
        repair.advance(decision)
    if decision.state.phase is JobPhase.RESTARTING:
        restart.advance_restarting(decision)
    if decision.state.phase is JobPhase.STARTING:
        restart.advance_starting(decision)
    if decision.state.phase is JobPhase.UNPROTECTED:
        restart.advance_unprotected(decision)
    if decision.state.phase is JobPhase.RUNNING:
        repair.report(decision)
    if decision.state.phase in (JobPhase.UNPROTECTED, JobPhase.RUNNING) and _every_rank_is_through(decision.state):
        shutdown.release(decision)
    spare_pool.heal(decision)
    spare_pool.prepare(decision)
    nodes.set_buddies(decision)
    if decision.state.phase is JobPhase.FINISHING:
        shutdown.advance_finishing(decision)
    if decision.state.phase is JobPhase.STOPPING:
        shutdown.advance_stopping(decision)


def _every_rank_is_through(state: State) -> bool:
    if all_done(state):
        return True
    counters = state.seat_counters
    return not counters.vacant and state.count(MemberPhase.FINISHED) == len(state.seats) - counters.done
