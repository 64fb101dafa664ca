"""What members say of themselves, obeyed only where the tables give it a meaning, and only in its own epoch."""

from collections.abc import Mapping
from typing import Any, assert_never

from deadpool_run.core import events as ev
from deadpool_run.core.copies import interval
from deadpool_run.core.recovery import repair, restart, spare_pool
from deadpool_run.core.state import State, Suspicion
from deadpool_run.core.turn import Turn
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
    | ev.NewcomerRehearsed
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


def hear(turn: Turn, event: Word) -> None:
    """Take in what a member said."""
    if not isinstance(event, RepairWord):
        _plain(turn, event)
    elif not is_current(turn.state, event.epoch):
        return
    elif isinstance(event, ev.DrainFailed):
        repair.drain_failed(turn, event)
    elif isinstance(event, ev.NewcomerRehearsed) and not _is_newcomer(turn, event):
        return
    else:
        _in_epoch(turn, event)


def _is_newcomer(turn: Turn, event: ev.NewcomerRehearsed) -> bool:
    member = turn.state.members.get(event.worker)
    return member is not None and member.newcomer


def _plain(turn: Turn, event: PlainWord) -> None:
    member = turn.accept(event.worker, event, **_changes(turn, event))
    if member is None:
        return
    match event:
        case ev.WorkerReady() | ev.LoopFinished() | ev.SparePrepared():
            pass  # its fields say it all
        case ev.PrepareFailed():
            spare_pool.unprepared(turn, f"the script could not be rehearsed: {event.message}")
        case ev.ScriptInitialized():
            turn.set(managed=True)
        case ev.SetupCompleted():
            turn.set(entered=True)
        case ev.LoopBypassed():
            restart.bypassed(turn)
        case ev.TranscriptSealed():
            assert member.rank is not None
            turn.set_seat(member.rank, sealed=True, like=event.like)
        case ev.CaptureSkipped():
            interval.skipped(turn, event)
        case ev.RunUnwound():
            repair.unwound(turn, member, event)
        case _:
            assert_never(event)


_ALWAYS_CHANGES: Mapping[type, dict[str, Any]] = {
    ev.SurvivorDrained: {"newcomer": False},
    ev.RunUnwound: {"newcomer": True},
    ev.RankRestored: {"newcomer": False},
    ev.RankAttached: {"reentered": False},
    ev.FirstStepCompleted: {"stepped": True},
}


def _changes(turn: Turn, event: Word) -> dict[str, Any]:
    """Return what becomes of a member by what it says, beside its phase."""
    match event:
        case ev.WorkerReady():
            return {"ready_at": turn.now}
        case ev.LoopFinished():
            return {"finished": event.version, "stepped": True}
        case _:
            return _ALWAYS_CHANGES.get(type(event), {})


def _in_epoch(
    turn: Turn,
    event: ev.SurvivorDrained
    | ev.NewcomerRehearsed
    | ev.RankRestored
    | ev.RankAttached
    | ev.AttachFailed
    | ev.FirstStepCompleted
    | ev.CollectiveFailed,
) -> None:
    member = turn.accept(event.worker, event, **_changes(turn, event))
    if member is None:
        return
    match event:
        case ev.SurvivorDrained():
            repair.drained(turn, member, event)
        case ev.NewcomerRehearsed():
            turn.set_repair(rehearsed_at=turn.now)
        case ev.RankRestored() | ev.RankAttached() | ev.AttachFailed() | ev.FirstStepCompleted():
            pass  # phase and fields say it all
        case ev.CollectiveFailed():
            if turn.state.suspicion is None:
                turn.set(suspicion=Suspicion(event.worker, turn.now, event.message))
        case _:
            assert_never(event)
