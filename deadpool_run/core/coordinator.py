"""The one door to the coordinator's state: every change of it goes through `step`.

Deterministic: the same state, event and time lead to the same state and orders. It never waits, reads a clock or does I/O.
"""

from collections.abc import Iterable

from deadpool_run.core import events as ev
from deadpool_run.core import reports, timers
from deadpool_run.core.copies import buddies, holders, interval, shortages
from deadpool_run.core.decision import Decision
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event
from deadpool_run.core.leadership import takeover
from deadpool_run.core.members import vacant_seats
from deadpool_run.core.recovery import losses, relocation, repair, restart, retries, shutdown, spare_pool
from deadpool_run.core.reports import Handler, accepted, in_epoch
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.core.timers import next_deadline
from deadpool_run.core.transitions import JobPhase, MemberPhase

__all__ = ["new_state", "next_deadline", "step"]

HANDLERS: dict[type[Event], Handler] = {
    ev.JobSubmitted: restart.submitted,
    ev.StopRequested: shutdown.stop_requested,
    ev.KillRequested: losses.kill_requested,
    ev.SlowRequested: losses.slow_requested,
    ev.AgentKillRequested: losses.agent_kill_requested,
    ev.DrainRequested: relocation.requested,
    ev.TimeAdvanced: lambda decision, _: timers.advance(decision),
    ev.CoordinatorMoved: lambda _decision, _event: None,  # `takeover.events_to_handle` has done it all
    ev.NodeResynced: takeover.resynced_late,
    ev.NodeJoined: lambda decision, event: decision.add_node(event.node, event.place),
    ev.NodeLost: lambda decision, event: losses.nodes_lost(decision, [event]),
    ev.NodesLost: lambda decision, event: losses.nodes_lost(decision, event.losses),
    ev.SnapshotCommitted: buddies.committed,
    ev.ReplicasReported: holders.reported,
    ev.CopyRefused: shortages.refused,
    ev.RefusedCopyTaken: shortages.taken,
    ev.DeviceFailed: losses.device_failed,
    ev.FetchFailed: losses.fetch_failed,
    ev.WorkerStarted: reports.started,
    ev.WorkerStartFailed: losses.worker_ended,
    ev.WorkerExited: losses.worker_ended,
    ev.WorkerRaised: reports.raised,
    ev.WorkerHung: reports.hung,
    ev.JobRefused: accepted(reports.refused),
    ev.WorkerReady: reports.ready,
    ev.SparePrepared: accepted(),
    ev.PrepareFailed: accepted(reports.prepare_failed),
    ev.ScriptInitialized: accepted(reports.initialized),
    ev.SetupCompleted: accepted(reports.setup_completed),
    ev.LoopBypassed: accepted(restart.bypassed),
    ev.TranscriptCompleted: accepted(reports.transcript_completed),
    ev.CaptureSkipped: accepted(interval.skipped),
    ev.StepsLimited: in_epoch(accepted(relocation.limited)),
    ev.LoopFinished: reports.loop_finished,
    ev.AbortCompleted: in_epoch(accepted(relocation.aborted, replacement=False)),
    ev.AbortFailed: in_epoch(repair.abort_failed),
    ev.RunUnwound: accepted(repair.unwound, replacement=True),
    ev.ReplacementRehearsed: in_epoch(reports.rehearsed),
    ev.RankRestored: in_epoch(accepted(replacement=False)),
    ev.RankAttached: in_epoch(accepted(reentered=False)),
    ev.AttachFailed: in_epoch(accepted(retries.unattached)),
    ev.FirstStepCompleted: in_epoch(accepted(stepped=True)),
    ev.CollectiveFailed: in_epoch(accepted(reports.collective_failed)),
    ev.RanksReported: lambda decision, event: _reported(decision, event.reports),
}
"""The handler of each event. `_advance` then decides what follows."""


def new_state(settings: Settings) -> State:
    """Return the state of a job that nothing has happened to."""
    return State(
        phase=JobPhase.NEW,
        capture_interval=settings.capture_interval,
        seats=vacant_seats(settings.world_size),
    )


def step(settings: Settings, state: State, event: Event, now: float) -> tuple[Effect, ...]:
    """Change the state by one event, and return the orders to perform, in this order.

    `now` is in seconds of one monotonic clock. Stale or irrelevant events change nothing. A step that raises leaves the
    state void: no further step takes it.
    """
    assert not state.is_void, "an earlier step failed half-way"
    state.is_void = True
    decision = Decision(settings, state, now)
    for each in takeover.events_to_handle(decision, event):
        if state.phase is not JobPhase.STOPPED:
            HANDLERS[type(each)](decision, each)
            _advance(decision)
    state.is_void = False
    return tuple(decision.effects)


def _advance(decision: Decision) -> None:
    """Decide what follows from all events so far. Each phase is left at most once."""
    state = decision.state
    if state.phase is JobPhase.REPAIRING:
        repair.advance(decision)
    if state.phase is JobPhase.RESTARTING:
        restart.advance_restarting(decision)
    if state.phase is JobPhase.STARTING:
        restart.advance_starting(decision)
    if state.phase is JobPhase.SETTING_UP:
        restart.advance_setup(decision)
    if state.phase is JobPhase.RUNNING:
        repair.report(decision)
        relocation.advance(decision)
    if state.phase in (JobPhase.SETTING_UP, JobPhase.RUNNING) and _every_rank_is_through(state):
        shutdown.release(decision)
    if state.phase is JobPhase.REPAIRING:
        relocation.reopen(decision)
    spare_pool.heal(decision)
    spare_pool.prepare(decision)
    buddies.update(decision)
    relocation.release_nodes(decision)
    if state.phase is JobPhase.FINISHING:
        shutdown.advance_finishing(decision)
    if state.phase is JobPhase.STOPPING:
        shutdown.advance_stopping(decision)


def _reported(decision: Decision, together: Iterable[ev.RankReport]) -> None:
    for report in together:
        HANDLERS[type(report)](decision, report)


def _every_rank_is_through(state: State) -> bool:
    counters = state.seat_counters
    return not counters.vacant and state.count(MemberPhase.FINISHED) == len(state.seats) - counters.done
