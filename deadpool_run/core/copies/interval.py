"""The capture interval: longer while captures are skipped, back to the user's when none is."""

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.decision import Decision
from deadpool_run.core.members import NO_VERSION, Member
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.core.transitions import HOLDS_RANK, MemberPhase
from deadpool_run.ids import Version

_TOLD = HOLDS_RANK - {MemberPhase.RAISED, MemberPhase.ENDING, MemberPhase.RELEASED}


def skipped(decision: Decision, member: Member, event: ev.CaptureSkipped) -> None:
    """Lengthen the interval. Skips of versions that were due before it was last lengthened do not count.

    Nor do those for lack of memory, which a longer interval would not mend.
    """
    state = decision.state
    if event.no_memory:
        _note_no_memory(decision, member, event)
        return
    quiet_s = None if state.skipped_at is None else decision.now - state.skipped_at
    state.skipped_at = decision.now
    longer = min(state.capture_interval * 2, decision.settings.max_capture_interval)
    if event.version <= state.raised_to or longer <= state.capture_interval:
        return
    if state.halved:  # if that was in vain, wait longer until the next try
        settings, waited_s = decision.settings, calm_s(decision.settings, state)
        in_vain = quiet_s is not None and quiet_s <= waited_s
        state.calm_s = min(waited_s * 2, settings.max_calm_s) if in_vain else settings.calm_s
        state.halved = False
    state.raised_to = Version(event.version + longer)
    _set_interval(decision, longer, "captures are skipped: they take longer than the steps between them")


def _note_no_memory(decision: Decision, member: Member, event: ev.CaptureSkipped) -> None:
    if member.no_memory:
        return
    decision.set_member(member.worker, no_memory=True)
    rank = "" if member.rank is None else f"rank {member.rank} "
    decision.announce(
        f"{rank}takes no snapshot",
        f"{event.no_memory}. A loss repeats every step since the last snapshot; give the job more memory, or fewer ranks a node",
    )


def calm_s(settings: Settings, state: State) -> float:
    """Return for how long no capture must be skipped before the interval is halved."""
    return state.calm_s or settings.calm_s


def calm(decision: Decision) -> None:
    """Halve the interval after a stretch without a skip."""
    state = decision.state
    shorter = max(state.capture_interval // 2, decision.settings.capture_interval)
    reason = f"no capture was skipped for {calm_s(decision.settings, state):g} s"
    state.skipped_at, state.raised_to, state.halved = decision.now, NO_VERSION, True
    _set_interval(decision, shorter, reason)


def _set_interval(decision: Decision, interval: int, reason: str) -> None:
    decision.state.capture_interval = interval
    decision.announce(f"a snapshot every {interval} steps", reason)
    for member in decision.state.owners():
        if member.phase in _TOLD:
            decision.effects.append(do.SetCaptureInterval(member.worker, interval))
