"""The world: begun from the top, and begun again while (or where) a loss cannot be repaired in place."""

from signal import SIGTERM

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core import nodes, placement
from deadpool_run.core.decision import Decision
from deadpool_run.core.recovery import blame, shutdown
from deadpool_run.core.rows import Seats
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NO_VERSION, Seat, State
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.ids import Rank

MANAGED_RESTARTS = 3
"""Restarts of a world whose scripts called `init()`, unless the user says another number."""
UNPROTECTED_S = 60.0
"""A world that begins is protected within this time, or the user is told why not."""
_UNTIL_THEN = "until then a lost rank restarts the script from the beginning"


def vacant_seats(world_size: int) -> Seats[Seat]:
    """Return the seats of a world that begins."""
    return Seats(Seat(Rank(rank)) for rank in range(world_size))


def submitted(decision: Decision, event: ev.JobSubmitted) -> None:
    """Begin the first world, on the first node."""
    if decision.state.phase is JobPhase.NEW:
        nodes.joined(decision, event.node, event.place)
        _begin(decision, "the job was submitted")


def restarts_allowed(settings: Settings, state: State) -> int:
    """Return how often the world may start again."""
    if settings.max_restarts is not None:
        return settings.max_restarts
    return MANAGED_RESTARTS if state.managed else 0


def describe_limit(state: State, allowed: int) -> str:
    """Return the end of a sentence that says why there is no further restart."""
    return f" (the world was started again {state.restarts} times; {allowed} are allowed)" if allowed else ""


def restart(decision: Decision, reason: str) -> None:
    """End the world, to begin it again; or stop the job if that was done often enough."""
    allowed = restarts_allowed(decision.settings, decision.state)
    if decision.state.restarts >= allowed:
        shutdown.stop(decision, 1, f"{reason}{describe_limit(decision.state, allowed)}")
        return
    decision.set(restarts=decision.state.restarts + 1)
    end(decision, f"starting the world again ({decision.state.restarts} of at most {allowed})", reason)


def end(decision: Decision, what: str, reason: str) -> None:
    """End the world, to begin it again, however often that was done."""
    decision.enter(JobPhase.RESTARTING, reason)
    decision.set(suspicion=None, repair=None)
    decision.announce(what, reason)
    with decision.for_all():
        for member in decision.state.owners():
            if member.phase is MemberPhase.ENDING:
                continue
            if decision.state.managed:
                decision.kill(member.worker, reason)  # set-up holds nothing worth saving, and may hang in a collective
            else:
                decision.terminate(member.worker, SIGTERM, reason)
        for member in decision.state.in_phase(MemberPhase.READY, MemberPhase.PREPARING):
            if member.prepared is not None:
                decision.kill(member.worker, "what it has rehearsed is of the last world")


def advance_restarting(decision: Decision) -> None:
    """Begin again when nobody of the old world is left."""
    if not decision.state.member_tally.bound:
        decision.set(generation=decision.state.generation + 1)
        _begin(decision, decision.state.reason)


def advance_starting(decision: Decision) -> None:
    """Give every rank a worker, once there are nodes and workers enough."""
    seatings = placement.world(decision.settings, decision.state)
    if seatings:
        with decision.for_all():
            for seating in seatings:
                decision.assign(seating, replacement=False)
    if seatings:
        decision.enter(JobPhase.UNPROTECTED, "every rank has a worker")
        decision.set(warn_at=decision.now + UNPROTECTED_S)


def bypassed(decision: Decision) -> None:
    """Tell the user once a world that its loop is not the library's."""
    if not decision.state.bypassed:
        decision.set(bypassed=True, unprotected=True, warn_at=None)
        decision.announce(*describe_unprotected(decision.state))


def unprotected(decision: Decision) -> None:
    """Take the world for one that stays unprotected. Tell the user, unless it is in its loop, whose steps may be long."""
    decision.set(unprotected=True, warn_at=None)
    if not decision.state.entered:
        decision.announce(*describe_unprotected(decision.state))


def describe_unprotected(state: State) -> tuple[str, str]:
    """Return what a world lacks to be protected, and what that means or how it is mended."""
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
        "a lost rank ends the job, or restarts it from the beginning with --max-restarts; spares cannot help",
    )


def advance_unprotected(decision: Decision) -> None:
    """Be protected, once every rank can be rehearsed and, where there are buddies, they hold what it takes."""
    if decision.state.buddies and not decision.state.committed:
        return
    tally = decision.state.seat_tally
    if not tally.unsealed and not tally.done:
        decision.enter(JobPhase.RUNNING, "every rank can be replaced from now on")
        decision.set(raises=blame.still_evidence(decision.state.raises))


def _begin(decision: Decision, reason: str) -> None:
    decision.enter(JobPhase.STARTING, reason)
    decision.set(
        seats=vacant_seats(decision.settings.world_size),
        capture_interval=decision.settings.capture_interval,
        skipped_at=None,
        raised_to=NO_VERSION,
        buddies=(),
        former_buddies=(),
        committed=False,
        warn_at=None,
        unprotected=False,
        entered=False,
        bypassed=False,
        exposed_at=None,
    )
    decision.next_epoch()
    decision.effects.append(do.BeginGeneration(decision.state.generation))
