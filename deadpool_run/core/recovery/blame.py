"""Blame for an exception: the machine (it is repaired), the script or the library (the job stops).

A fault of the script stops the job at once, before it costs a spare. A fault of the library stops the job when the rank's
replacement meets it too.
"""

from dataclasses import dataclass

from deadpool_run.core.events import DrainFailed, WorkerRaised
from deadpool_run.core.members import Member
from deadpool_run.core.state import Raise, State
from deadpool_run.core.transitions import MemberPhase
from deadpool_run.errors import Blame

MAX_EVIDENCE = 64
_HANDLED = frozenset(
    {
        *(MemberPhase.DRAINED, MemberPhase.REHEARSED, MemberPhase.RESTORING, MemberPhase.RESTORED),
        *(MemberPhase.ATTACHING, MemberPhase.UNATTACHED),
    }
)
"""Phases of a repair in which the library has the worker, not the script."""
_REPAIRED = _HANDLED | {
    *(MemberPhase.DRAINING, MemberPhase.RECALLED, MemberPhase.UNWINDING),
    *(MemberPhase.RE_ENTERING, MemberPhase.REHEARSING),
}
"""Phases of a repair. Empty answers may be to blame there, what an earlier run left in the process, or the library."""
MAX_ATTEMPTS = 5
"""Attempts at one repair, that is, without a completed step between them."""


@dataclass(frozen=True, slots=True)
class FaultVerdict:
    """Why another worker would fail too, with the tracebacks that prove it. `ours`: the library is to blame."""

    why: str
    tracebacks: str
    ours: bool = False


def evidence(state: State, member: Member, raised: WorkerRaised | DrainFailed) -> Raise:
    """Return an exception as evidence. `member` is as it was before it raised; it holds a rank."""
    assert member.rank is not None
    ready = {spare.node for spare in state.in_phase(MemberPhase.READY)}
    return Raise(
        worker=member.worker,
        rank=member.rank,
        epoch=state.epoch,
        repaired=isinstance(raised, DrainFailed) or member.phase in _REPAIRED,
        rehearsed=member.phase is MemberPhase.REHEARSING,
        drained=isinstance(raised, DrainFailed),
        handled=member.phase in _HANDLED,
        released=member.phase is MemberPhase.RELEASED,
        step=raised.step,
        kind=raised.kind,
        message=raised.message if isinstance(raised, WorkerRaised) else raised.error,
        traceback=raised.traceback,
        place=(member.node, state.seats[member.rank].local_rank),
        elsewhere=bool(ready - {member.node}),
        blame=raised.blame,
    )


def still_evidence(raises: tuple[Raise, ...]) -> tuple[Raise, ...]:
    """Return what still counts once every rank has completed a step: exceptions raised after the loop."""
    return tuple(one for one in raises if one.released)


def judge(raises: tuple[Raise, ...], new: Raise) -> FaultVerdict | None:
    """Return what the earlier exceptions and `new` prove together; None if another worker may do better."""
    raises = tuple(old for old in raises if not (new.elsewhere and old.place == new.place))
    if (old := _script_bug(raises, new)) is not None:
        return FaultVerdict(_describe_bug(old, new), _both_tracebacks(old, new))
    if (old := _again(raises, new)) is not None:
        return FaultVerdict(_describe_ours(old, new), _both_tracebacks(old, new), ours=True)
    if (old := _unrehearsable(raises, new)) is not None:
        why = f"a replacement for rank {new.rank} cannot rehearse the script: {named(new)}"
        return FaultVerdict(why, _both_tracebacks(old, new))
    return None


def is_first_of_ours(raises: tuple[Raise, ...], new: Raise) -> bool:
    """Tell whether the exception is our own, and no other of its kind has been told of."""
    return new.blame is Blame.OURS and not any((old.blame, old.kind) == (new.blame, new.kind) for old in raises)


def named(raised: Raise) -> str:
    """Return the exception as Python names it."""
    return f"{raised.kind}: {raised.message}"


def _script_bug(raises: tuple[Raise, ...], new: Raise) -> Raise | None:
    """Return the earlier exception that, with `new`, proves a bug in the script; None if none does.

    Two workers that end at the same step with the same exception are no coincidence; nor are two that raise the same
    kind at the same step of the same epoch, whatever their messages say. A worker that is being repaired computes with
    garbage, or is in the library's hands: what it raises counts only beside one that was not. Our own never counts.
    """
    if new.blame is not Blame.SCRIPT:
        return None
    for old in reversed(raises):
        if old.worker == new.worker or (old.step, old.kind, old.blame) != (new.step, new.kind, new.blame):
            continue
        repaired = old.repaired and new.repaired
        at_once = old.epoch == new.epoch and not (old.repaired or new.repaired)
        if (old.message == new.message and not repaired) or at_once:
            return old
    return None


def _again(raises: tuple[Raise, ...], new: Raise) -> Raise | None:
    """Return an earlier exception of the kind that ended the rank's last worker too, if it is the library's doing.

    That is, if its frames are ours, or if both workers were in the library's hands: not in their script, which can raise.
    What interrupts only a drain is mended by running the script again.
    """
    if new.drained or new.blame is Blame.NOBODY:
        return None
    for old in reversed(raises):
        same = (old.rank, old.kind) == (new.rank, new.kind) and old.worker != new.worker
        ours = old.blame is new.blame is Blame.OURS
        if same and (ours or (old.handled and new.handled)):
            return old
    return None


def _unrehearsable(raises: tuple[Raise, ...], new: Raise) -> Raise | None:
    """Return an earlier exception of another replacement's rehearsal with the same reason."""
    if not new.rehearsed or new.blame is not Blame.SCRIPT:
        return None
    for old in reversed(raises):
        same = (old.kind, old.message, old.blame) == (new.kind, new.message, new.blame)
        if old.rehearsed and old.worker != new.worker and same:
            return old
    return None


def _describe_ours(first: Raise, second: Raise) -> str:
    whose = "an error of deadpool-run, not of the script"
    if second.blame is not Blame.OURS:
        whose = "a repair failed, by an error of deadpool-run unless the traceback ends in the script"
    return (
        f"{whose}: rank {second.rank} raised {second.kind} twice, in worker {first.worker} and in its replacement "
        f"{second.worker}: {second.message}"
    )


def _describe_bug(first: Raise, second: Raise) -> str:
    """Return why the script is to blame, in one line."""
    where = "outside the step loop" if second.step is None else f"in step {second.step}"
    return (
        f"a bug in the script: rank {first.rank} and rank {second.rank} (workers {first.worker} and {second.worker}) "
        f"raised {second.kind} {where}: {second.message}"
        if first.rank != second.rank
        else f"a bug in the script: rank {second.rank} raised {second.kind} {where} twice, "
        f"in worker {first.worker} and in worker {second.worker}: {second.message}"
    )


def _both_tracebacks(first: Raise, second: Raise) -> str:
    """Return the tracebacks for the user."""
    return "\n".join(
        f"--- rank {one.rank}, worker {one.worker} ---\n{one.traceback.rstrip()}" for one in (first, second)
    )
