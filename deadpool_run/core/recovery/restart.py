"""The start of the world, and its restart after a loss that cannot be repaired in place."""

from signal import SIGTERM

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core import placement, places
from deadpool_run.core.decision import Decision
from deadpool_run.core.members import NO_VERSION, Member
from deadpool_run.core.recovery import blame, shutdown
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase, MemberPhase

MANAGED_RESTARTS = 3
"""Restarts of a world whose scripts called `init()`, unless the user says another number."""
OVERDUE_S = 60.0
"""If a world is not protected within this time, the user is told why not."""
_UNTIL_THEN = "until then a lost rank restarts the script from the beginning"


def submitted(decision: Decision, event: ev.JobSubmitted) -> None:
    """Begin the first world, on the first node."""
    if decision.state.phase is JobPhase.NEW:
        decision.state.founded = event.term
        decision.add_node(event.node, event.place)
        _begin(decision, "the job was submitted")


def restarts_allowed(settings: Settings, state: State) -> int:
    """Return how often the world may start again."""
    if settings.max_restarts is not None:
        return settings.max_restarts
    return MANAGED_RESTARTS if state.managed else 0


def count(decision: Decision, reason: str, *, possible: bool = True) -> str:
    """Count a restart, and return which one it is in words; empty if none is left, or possible, and the job stops."""
    state, allowed = decision.state, restarts_allowed(decision.settings, decision.state)
    if state.restarts >= allowed or not possible:
        limit = f" (the world was started again {state.restarts} times; {allowed} are allowed)" if allowed else ""
        shutdown.stop(decision, 1, f"{reason}{limit}")
        return ""
    state.restarts += 1
    return f"({state.restarts} of at most {allowed})"


def restart(decision: Decision, reason: str) -> None:
    """Restart the world, or stop the job if no restart is left."""
    if which := count(decision, reason):
        end(decision, f"starting the world again {which}", reason)


def end(decision: Decision, what: str, reason: str) -> None:
    """End the world, to begin it again. Not counted as a restart."""
    decision.enter(JobPhase.RESTARTING, reason)
    state = decision.state
    state.suspicion = state.repair = None
    decision.end_relocation()
    decision.announce(what, reason)
    for member in state.owners():
        if member.phase is MemberPhase.ENDING:
            continue
        if state.managed:  # set-up has nothing to save, and may hang in a collective
            decision.kill(member.worker, reason)
        else:
            decision.terminate(member.worker, SIGTERM, reason)
    for member in state.in_phase(MemberPhase.READY, MemberPhase.PREPARING):
        if member.prepared is not None:
            decision.kill(member.worker, "it has rehearsed in the last world")


def advance_restarting(decision: Decision) -> None:
    """Begin again when no worker of the old world is left."""
    if not decision.state.member_counters.bound:
        decision.state.generation += 1
        _begin(decision, decision.state.reason)


def advance_starting(decision: Decision) -> None:
    """Give every rank a worker, once there are enough nodes and workers."""
    seatings = placement.world(decision.settings, decision.state)
    for seating in seatings:
        decision.assign(seating, replacement=False)
    if seatings:
        decision.enter(JobPhase.SETTING_UP, "every rank has a worker")
        decision.state.warn_at = decision.now + OVERDUE_S


def bypassed(decision: Decision, _member: Member, _event: ev.LoopBypassed) -> None:
    """Warn the user, once a world, that the script trains outside the library's loop."""
    state = decision.state
    if not state.bypassed:
        state.bypassed, state.protection_overdue, state.warn_at = True, True, None
        decision.announce(*why_unprotected(state))


def protection_overdue(decision: Decision) -> None:
    """Note that the world should be protected by now. Warn the user, unless ranks are in their loop: their steps may be long."""
    state = decision.state
    state.protection_overdue, state.warn_at = True, None
    if not state.entered:
        decision.announce(*why_unprotected(state))


def why_unprotected(state: State) -> tuple[str, str]:
    """Return what a world lacks to be protected, and what that means or how to change it."""
    if state.bypassed:
        return (
            "the script trains outside job.steps(): a lost rank restarts it from the beginning",
            "write `for step in job.steps(N):` in place of the script's own loop",
        )
    if state.entered:
        return "the job is not protected yet: its first two steps, or their copies, are not complete", _UNTIL_THEN
    if state.managed:
        return "the job is not protected yet: no rank has entered job.steps()", _UNTIL_THEN
    return (
        "the job is not protected: the script has not called deadpool_run.init()",
        "a lost rank ends the job, or with --max-restarts makes every rank start again from the beginning",
    )


def advance_setup(decision: Decision) -> None:
    """Count the world as protected, once every rank can be rehearsed and the buddies, if any, hold its copies."""
    if decision.state.buddies and not decision.state.committed:
        return
    counters = decision.state.seat_counters
    if not counters.unrehearsable and not counters.done:
        decision.enter(JobPhase.RUNNING, "every rank can be replaced from now on")
        places.note_steps(decision.state)
        decision.state.raises = blame.still_evidence(decision.state.raises)


def _begin(decision: Decision, reason: str) -> None:
    decision.enter(JobPhase.STARTING, reason)
    decision.vacate_all()
    state = decision.state
    state.capture_interval = decision.settings.capture_interval
    state.skipped_at, state.raised_to, state.calm_s, state.halved = None, NO_VERSION, 0.0, False
    state.buddies = state.former_buddies = ()
    state.parity_groups = ()
    state.warn_at = state.exposed_at = None
    state.committed = state.protection_overdue = state.entered = state.bypassed = False
    decision.next_epoch()
    decision.effects.append(do.BeginGeneration(decision.state.generation))
