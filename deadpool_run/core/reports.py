"""What members say of themselves, obeyed only where the tables give it a meaning, and only in its own epoch."""

from collections.abc import Mapping
from typing import Any, assert_never

from deadpool_run.core import events as ev
from deadpool_run.core.copies import interval
from deadpool_run.core.decision import Decision
from deadpool_run.core.recovery import repair, restart, spare_pool
from deadpool_run.core.state import State, Suspicion
from deadpool_run.ids import Epoch

PlainWord = (
    ev.WorkerReady
    | ev.SparePrepared
    | ev.PrepareFailed
    | ev.ScriptInitialized
    | ev.SetupCompleted
    | ev.LoopBypassed
    | ev.TranscriptSealed
    | ev.CaptureSkipped
    | ev.LoopFinished
    | ev.RunUnwound
)
RepairWord = (
    ev.SurvivorDrained
    | ev.DrainFailed
    | ev.ReplacementRehearsed
    | ev.RankRestored
    | ev.RankAttached
    | ev.AttachFailed
    | ev.FirstStepCompleted
    | ev.CollectiveFailed
)
"""Said in an epoch, and void in every other."""
Word = PlainWord | RepairWord


def is_current(state: State, epoch: Epoch) -> bool:
    """Tell whether something said in this epoch still counts."""
    return epoch == state.epoch


def hear(decision: Decision, event: Word) -> None:
    """Take in what a member said."""
    if not isinstance(event, RepairWord):
        _plain(decision, event)
    elif not is_current(decision.state, event.epoch):
        return
    elif isinstance(event, ev.DrainFailed):
        repair.drain_failed(decision, event)
    elif isinstance(event, ev.ReplacementRehearsed) and not _is_replacement(decision, event):
        return
    else:
        _in_epoch(decision, event)


def _is_replacement(decision: Decision, event: ev.ReplacementRehearsed) -> bool:
    member = decision.state.members.get(event.worker)
    return member is not None and member.replacement


def _plain(decision: Decision, event: PlainWord) -> None:
    member = decision.accept(event.worker, event, **_changes(decision, event))
    if member is None:
        return
    match event:
        case ev.WorkerReady() | ev.LoopFinished() | ev.SparePrepared():
            pass  # its fields say it all
        case ev.PrepareFailed():
            spare_pool.unprepared(decision, f"the script could not be rehearsed: {event.message}")
        case ev.ScriptInitialized():
            decision.state.managed = True
        case ev.SetupCompleted():
            decision.state.entered = True
        case ev.LoopBypassed():
            restart.bypassed(decision)
        case ev.TranscriptSealed():
            assert member.rank is not None
            decision.set_seat(member.rank, sealed=True, like=event.like)
        case ev.CaptureSkipped():
            interval.skipped(decision, event)
        case ev.RunUnwound():
            repair.unwound(decision, member, event)
        case _:
            assert_never(event)


_ALWAYS_CHANGES: Mapping[type, dict[str, Any]] = {
    ev.SurvivorDrained: {"replacement": False},
    ev.RunUnwound: {"replacement": True},
    ev.RankRestored: {"replacement": False},
    ev.RankAttached: {"reentered": False},
    ev.FirstStepCompleted: {"stepped": True},
}


def _changes(decision: Decision, event: Word) -> dict[str, Any]:
    """Return what becomes of a member by what it says, beside its phase."""
    match event:
        case ev.WorkerReady():
            return {"ready_at": decision.now}
        case ev.LoopFinished():
            return {"finished": event.version, "stepped": True}
        case _:
            return _ALWAYS_CHANGES.get(type(event), {})


def _in_epoch(
    decision: Decision,
    event: ev.SurvivorDrained
    | ev.ReplacementRehearsed
    | ev.RankRestored
    | ev.RankAttached
    | ev.AttachFailed
    | ev.FirstStepCompleted
    | ev.CollectiveFailed,
) -> None:
    member = decision.accept(event.worker, event, **_changes(decision, event))
    if member is None:
        return
    match event:
        case ev.SurvivorDrained():
            repair.drained(decision, member, event)
        case ev.ReplacementRehearsed():
            decision.repair.rehearsed_at = decision.now
        case ev.RankRestored() | ev.RankAttached() | ev.AttachFailed() | ev.FirstStepCompleted():
            pass  # phase and fields say it all
        case ev.CollectiveFailed():
            if decision.state.suspicion is None:
                decision.state.suspicion = Suspicion(event.worker, decision.now, event.message)
        case _:
            assert_never(event)
