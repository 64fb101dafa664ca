"""Blame for an exception: the machine, which is repaired, or the script or the library, which stop the job.

A fault of the library stops the job only when the rank's replacement meets it too.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from deadpool_run.core import placement
from deadpool_run.core.events import AbortFailed, WorkerRaised
from deadpool_run.core.members import Member
from deadpool_run.core.state import Raise, State
from deadpool_run.core.transitions import MemberPhase
from deadpool_run.errors import Blame
from deadpool_run.ids import Rank

MAX_EVIDENCE = 64
_HANDLED = frozenset(
    {
        *(MemberPhase.ABORTED, MemberPhase.REHEARSED, MemberPhase.RESTORING, MemberPhase.RESTORED),
        *(MemberPhase.ATTACHING, MemberPhase.UNATTACHED),
    }
)
"""Phases of a repair in which the worker runs the library's code, not the script's."""
_REPAIRED = _HANDLED | {
    *(MemberPhase.ABORTING, MemberPhase.RECALLED, MemberPhase.UNWINDING),
    *(MemberPhase.RE_ENTERING, MemberPhase.REHEARSING),
}
"""Phases of a repair. What a worker raises there may come of empty answers, of an earlier run of the script, or of the library."""
MAX_ATTEMPTS = 5
"""Attempts at one repair: no step is completed between them."""


@dataclass(frozen=True, slots=True)
class FaultVerdict:
    """Why other workers would fail too, and the tracebacks that prove it. `ours`: the library is to blame."""

    why: str
    tracebacks: str
    ours: bool = False


def evidence(state: State, member: Member, raised: WorkerRaised | AbortFailed) -> Raise:
    """Return an exception as evidence. `member` is as it was before it raised; it holds a rank."""
    assert member.rank is not None
    ready = {spare.node for spare in state.in_phase(MemberPhase.READY)}
    return Raise(
        worker=member.worker,
        rank=member.rank,
        epoch=state.epoch,
        phase=member.phase,
        in_abort=isinstance(raised, AbortFailed),
        step=raised.step,
        kind=raised.kind,
        message=raised.message if isinstance(raised, WorkerRaised) else raised.error,
        traceback=raised.traceback,
        place=(member.node, state.seats[member.rank].local_rank),
        elsewhere=bool(ready - {member.node} or placement.good_devices(state, member.node)),
        blame=raised.blame if member.injected_at is None else Blame.NOBODY,
    )


def still_evidence(raises: tuple[Raise, ...]) -> tuple[Raise, ...]:
    """Return the exceptions that count after every rank has completed a step: those raised after the loop."""
    return tuple(one for one in raises if one.phase is MemberPhase.RELEASED)


def judge(raises: tuple[Raise, ...], new: Raise) -> FaultVerdict | None:
    """Return what `new` proves together with an earlier exception; None if another worker may do better."""
    others = [
        old for old in reversed(raises) if old.worker != new.worker and not (new.elsewhere and old.place == new.place)
    ]
    for proves, describe in _PROOFS:
        old = next((old for old in others if proves(old, new)), None)
        if old is not None:
            tracebacks = [
                f"--- rank {one.rank}, worker {one.worker} ---\n{one.traceback.rstrip()}" for one in (old, new)
            ]
            return FaultVerdict(describe(old, new), "\n".join(tracebacks), ours=proves is _is_ours)
    return None


def is_first_of_ours(raises: tuple[Raise, ...], new: Raise) -> bool:
    """Tell whether the exception is our own, and the first of its kind."""
    return new.blame is Blame.OURS and not any((old.blame, old.kind) == (new.blame, new.kind) for old in raises)


def named(raised: Raise) -> str:
    """Return the exception as Python names it."""
    return f"{raised.kind}: {raised.message}"


def _is_script_bug(old: Raise, new: Raise) -> bool:
    """Tell whether the exceptions of two workers prove a bug in the script.

    They do if both are of one kind at one step, and have one message or are of one epoch. A worker that is being repaired
    computes with garbage, or runs our code: its exception counts only together with one of a worker that is not. Exceptions
    of deadpool-run never count.
    """
    if not (old.blame is new.blame is Blame.SCRIPT and (old.step, old.kind) == (new.step, new.kind)):
        return False
    repaired = [one.in_abort or one.phase in _REPAIRED for one in (old, new)]
    at_once = old.epoch == new.epoch and not any(repaired)
    return (old.message == new.message and not all(repaired)) or at_once


def _is_ours(old: Raise, new: Raise) -> bool:
    """Tell whether the library ended a rank's worker and its replacement with one kind of exception.

    That is, if both have frames of ours, or if both workers ran our code and not their script, which can raise.
    What interrupts only an abort is mended by running the script again.
    """
    if (
        new.in_abort
        or {old.blame, new.blame} & {Blame.NOBODY, Blame.DEVICE}
        or (old.rank, old.kind) != (new.rank, new.kind)
    ):
        return False
    return old.blame is new.blame is Blame.OURS or {old.phase, new.phase} <= _HANDLED


def _is_unrehearsable(old: Raise, new: Raise) -> bool:
    """Tell whether the rehearsals of two replacements ended for the same reason."""
    same = (old.kind, old.message) == (new.kind, new.message)
    return same and old.phase is new.phase is MemberPhase.REHEARSING and old.blame is new.blame is Blame.SCRIPT


def _describe_ours(first: Raise, second: Raise) -> str:
    whose = "an error of deadpool-run, not of the script"
    if second.blame is not Blame.OURS:
        whose = "a repair failed, by an error of deadpool-run unless the traceback ends in the script"
    return (
        f"{whose}: rank {second.rank} raised {second.kind} twice, in worker {first.worker} and in its replacement "
        f"{second.worker}: {second.message}"
    )


def _describe_bug(first: Raise, second: Raise) -> str:
    where = "outside the step loop" if second.step is None else f"in step {second.step}"
    return (
        f"a bug in the script: rank {first.rank} and rank {second.rank} (workers {first.worker} and {second.worker}) "
        f"raised {second.kind} {where}: {second.message}"
        if first.rank != second.rank
        else f"a bug in the script: rank {second.rank} raised {second.kind} {where} twice, "
        f"in worker {first.worker} and in worker {second.worker}: {second.message}"
    )


_PROOFS = (
    (_is_script_bug, _describe_bug),
    (_is_ours, _describe_ours),
    (_is_unrehearsable, lambda _, new: f"a replacement for rank {new.rank} cannot rehearse the script: {named(new)}"),
)
"""The proofs by the exceptions of two workers, and their words. The first that fits counts."""


def votes(reports: Mapping[Rank, tuple[Rank, ...]]) -> Mapping[Rank, int]:
    """Return how many of the ranks that could not connect did not reach each rank. `reports` are the names by each of them."""
    return Counter(named for rank, names in reports.items() for named in set(names) if named != rank)


def to_replace(reports: Mapping[Rank, tuple[Rank, ...]], reporter: Rank) -> Rank | None:
    """Return the rank to replace because communicators cannot be built; None if no replacement would help.

    It is the rank that more than half of the reports name. If the reports name no rank, or are two that name each other, it is
    the `reporter`.
    """
    counts = votes(reports)
    if not counts or (len(reports) == 2 and counts.keys() == reports.keys()):
        return reporter
    worst = max(sorted(counts), key=counts.__getitem__)
    return worst if 2 * counts[worst] > len(reports) else None
