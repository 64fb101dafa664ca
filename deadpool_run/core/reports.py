"""Handlers of worker reports. Reports that the transition table does not allow, or of other epochs, are ignored."""

from collections.abc import Callable
from typing import Any

from deadpool_run.core import events as ev
from deadpool_run.core.decision import Decision
from deadpool_run.core.members import Member
from deadpool_run.core.recovery import blame, repair, shutdown, spare_pool
from deadpool_run.core.state import State, Suspicion
from deadpool_run.core.transitions import MemberPhase
from deadpool_run.ids import Epoch

Handler = Callable[[Decision, Any], None]
"""Takes in an event of one class."""
Consequence = Callable[[Decision, Member, Any], None]
"""A further effect of a report, once it has moved its member."""


def is_current(state: State, epoch: Epoch) -> bool:
    """Tell whether a report of this epoch still counts."""
    return epoch == state.epoch


def accepted(then: Consequence | None = None, **changes: Any) -> Handler:
    """Return a handler that moves the member as the transition table says, and sets these fields."""

    def handle(decision: Decision, event: Any) -> None:
        member = decision.accept(event, **changes)
        if member is not None and then is not None:
            then(decision, member, event)

    return handle


def in_epoch(handler: Handler) -> Handler:
    """Return a handler of a report that is void in every other epoch."""

    def handle(decision: Decision, event: Any) -> None:
        if is_current(decision.state, event.epoch):
            handler(decision, event)

    return handle


# --- processes ------------------------------------------------------------------------------------------------------


def started(decision: Decision, event: ev.WorkerStarted) -> None:
    """Note the process. One that was ordered to die before it existed is ordered again."""
    member = decision.state.members.get(event.worker)
    if member is None:
        return
    decision.set_member(event.worker, pid=event.pid)
    if member.phase is MemberPhase.ENDING:
        decision.kill(event.worker, member.ending_why)


def raised(decision: Decision, event: ev.WorkerRaised) -> None:
    """Take the exception as evidence. Stop the job if it proves that the script is to blame."""
    member = decision.concerned(event)
    if member is None:
        return
    evidence = None if member.rank is None else blame.evidence(decision.state, member, event)  # as it was before
    decision.accept(event)
    if evidence is not None:
        repair.weigh(decision, evidence)


def refused(decision: Decision, member: Member, event: ev.JobRefused) -> None:
    """Stop the job, since another process would refuse too. Only a spare that refuses is given up instead."""
    if member.rank is None:
        spare_pool.unprepared(decision, event.message)
    else:
        shutdown.stop(decision, event.exit_code, event.message)


def hung(decision: Decision, event: ev.WorkerHung) -> None:
    """End a worker that makes no progress."""
    member = decision.concerned(event)
    if member is not None:
        decision.end(member, event.reason)


# --- set-up and the step loop ---------------------------------------------------------------------------------------


def ready(decision: Decision, event: ev.WorkerReady) -> None:
    """Note a worker that can be given a rank."""
    member = decision.accept(event, ready_at=decision.now)
    if member is not None:
        decision.state.never_ready.pop(member.node, None)


def prepare_failed(decision: Decision, _member: Member, event: ev.PrepareFailed) -> None:
    """Keep all spares parked from now on."""
    spare_pool.unprepared(decision, f"the script could not be rehearsed: {event.message}")


def initialized(decision: Decision, _member: Member, _event: ev.ScriptInitialized) -> None:
    """Note that steps of this job can be interrupted and repaired."""
    decision.state.managed = True


def setup_completed(decision: Decision, _member: Member, _event: ev.SetupCompleted) -> None:
    """Note that the world has entered its step loop."""
    decision.state.entered = True


def transcript_completed(decision: Decision, member: Member, event: ev.TranscriptCompleted) -> None:
    """Note that a replacement can rehearse the rank."""
    decision.set_seat(member.held_rank, rehearsable=True, like=event.like)


def loop_finished(decision: Decision, event: ev.LoopFinished) -> None:
    """Note a member that waits for its release."""
    decision.accept(event, finished=event.version, stepped=True)


# --- repairs --------------------------------------------------------------------------------------------------------


def rehearsed(decision: Decision, event: ev.ReplacementRehearsed) -> None:
    """Note a replacement that waits for the version to resume from."""
    member = decision.state.members.get(event.worker)
    if member is not None and member.replacement and decision.accept(event) is not None:
        decision.repair.rehearsed_at = decision.now


def collective_failed(decision: Decision, member: Member, event: ev.CollectiveFailed) -> None:
    """Suspect a loss. Only the first suspicion of an epoch counts."""
    if decision.state.suspicion is None:
        decision.state.suspicion = Suspicion(member.worker, decision.now, event.message)
