"""Whose fault an ending is: the machine's (it is repaired) or the script's (the job stops, and no spare is burnt)."""

from deadpool_run.core.events import DrainFailed, WorkerRaised
from deadpool_run.core.lifecycle import MemberPhase
from deadpool_run.core.membership import Member, Raise, State

MAX_EVIDENCE = 64
_DISTURBED = frozenset(
    {MemberPhase.DRAINING, MemberPhase.RECALLED, MemberPhase.UNWINDING, MemberPhase.RE_ENTERING, MemberPhase.REHEARSING}
)
"""Empty answers may be to blame there, or what an earlier run of the script left in the process."""
MAX_ATTEMPTS = 5
"""Attempts at one repair, that is, without a completed step between them."""


def evidence(state: State, member: Member, raised: WorkerRaised | DrainFailed) -> Raise:
    """Return an exception as evidence. `member` is as it was before it raised; it holds a rank."""
    assert member.rank is not None
    return Raise(
        worker=member.worker,
        rank=member.rank,
        epoch=state.epoch,
        draining=isinstance(raised, DrainFailed) or member.phase in _DISTURBED,
        released=member.phase is MemberPhase.RELEASED,
        step=raised.step,
        kind=raised.kind,
        message=raised.message if isinstance(raised, WorkerRaised) else raised.error,
        traceback=raised.traceback,
    )


def still_evidence(raises: tuple[Raise, ...]) -> tuple[Raise, ...]:
    """Return what still counts once every rank has got past its steps: what was raised after the loop."""
    return tuple(one for one in raises if one.released)


def script_bug(raises: tuple[Raise, ...], new: Raise) -> Raise | None:
    """Return the earlier exception that, with `new`, proves a bug in the script; None if none does.

    Two workers that end at the same step with the same exception are no coincidence; nor are two that raise the same
    kind at the same step of the same epoch, whatever their messages say. A draining worker computes with garbage, and one
    that re-enters does not begin in a fresh process: what they raise counts only beside one that did neither.
    """
    for old in reversed(raises):
        if old.worker == new.worker or (old.step, old.kind) != (new.step, new.kind):
            continue
        draining = old.draining and new.draining
        at_once = old.epoch == new.epoch and not (old.draining or new.draining)
        if (old.message == new.message and not draining) or at_once:
            return old
    return None


def describe_bug(first: Raise, second: Raise) -> str:
    """Return why the script is to blame, in one line."""
    where = "outside the step loop" if second.step is None else f"in step {second.step}"
    return (
        f"a bug in the script: rank {first.rank} and rank {second.rank} (workers {first.worker} and {second.worker}) "
        f"raised {second.kind} {where}: {second.message}"
        if first.rank != second.rank
        else f"a bug in the script: rank {second.rank} raised {second.kind} {where} twice, "
        f"in worker {first.worker} and in worker {second.worker}: {second.message}"
    )


def both_tracebacks(first: Raise, second: Raise) -> str:
    """Return the tracebacks for the user."""
    return "\n".join(
        f"--- rank {one.rank}, worker {one.worker} ---\n{one.traceback.rstrip()}" for one in (first, second)
    )
