"""The world: begun from the top, and begun again while (or where) a loss cannot be repaired in place."""

from signal import SIGTERM

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core import nodes, placement
from deadpool_run.core.recovery import blame, shutdown
from deadpool_run.core.rows import Seats
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NO_VERSION, Seat, State
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.core.turn import Turn
from deadpool_run.ids import Rank

MANAGED_RESTARTS = 3
"""Restarts of a world whose scripts called `init()`, unless the user says another number."""
UNPROTECTED_S = 60.0
"""A world that begins is protected within this time, or the user is told why not."""
_UNTIL_THEN = "until then a lost rank restarts the script from the beginning"


def vacant_seats(world_size: int) -> Seats[Seat]:
    """Return the seats of a world that begins."""
    return Seats(Seat(Rank(rank)) for rank in range(world_size))


def submitted(turn: Turn, event: ev.JobSubmitted) -> None:
    """Begin the first world, on the first node."""
    if turn.state.phase is JobPhase.NEW:
        nodes.joined(turn, event.node, event.place)
        _begin(turn, "the job was submitted")


def restarts_allowed(settings: Settings, state: State) -> int:
    """Return how often the world may start again."""
    if settings.max_restarts is not None:
        return settings.max_restarts
    return MANAGED_RESTARTS if state.managed else 0


def describe_limit(state: State, allowed: int) -> str:
    """Return the end of a sentence that says why there is no further restart."""
    return f" (the world was started again {state.restarts} times; {allowed} are allowed)" if allowed else ""


def restart(turn: Turn, reason: str) -> None:
    """End the world, to begin it again; or stop the job if that was done often enough."""
    allowed = restarts_allowed(turn.settings, turn.state)
    if turn.state.restarts >= allowed:
        shutdown.stop(turn, 1, f"{reason}{describe_limit(turn.state, allowed)}")
        return
    turn.set(restarts=turn.state.restarts + 1)
    end(turn, f"starting the world again ({turn.state.restarts} of at most {allowed})", reason)


def end(turn: Turn, what: str, reason: str) -> None:
    """End the world, to begin it again, however often that was done."""
    turn.enter(JobPhase.RESTARTING, reason)
    turn.set(suspicion=None, repair=None)
    turn.announce(what, reason)
    with turn.for_all():
        for member in turn.state.owners():
            if member.phase is MemberPhase.ENDING:
                continue
            if turn.state.managed:
                turn.kill(member.worker, reason)  # set-up holds nothing worth saving, and may hang in a collective
            else:
                turn.terminate(member.worker, SIGTERM, reason)
        for member in turn.state.in_phase(MemberPhase.READY, MemberPhase.PREPARING):
            if member.prepared is not None:
                turn.kill(member.worker, "what it has rehearsed is of the last world")


def advance_restarting(turn: Turn) -> None:
    """Begin again when nobody of the old world is left."""
    if not turn.state.member_tally.bound:
        turn.set(generation=turn.state.generation + 1)
        _begin(turn, turn.state.reason)


def advance_starting(turn: Turn) -> None:
    """Give every rank a worker, once there are nodes and workers enough."""
    seatings = placement.world(turn.settings, turn.state)
    if seatings:
        with turn.for_all():
            for seating in seatings:
                turn.assign(seating, newcomer=False)
    if seatings:
        turn.enter(JobPhase.UNPROTECTED, "every rank has a worker")
        turn.set(warn_at=turn.now + UNPROTECTED_S)


def bypassed(turn: Turn) -> None:
    """Tell the user once a world that its loop is not the library's."""
    if not turn.state.bypassed:
        turn.set(bypassed=True, unprotected=True, warn_at=None)
        turn.announce(*describe_unprotected(turn.state))


def unprotected(turn: Turn) -> None:
    """Take the world for one that stays unprotected. Tell the user, unless it is in its loop, whose steps may be long."""
    turn.set(unprotected=True, warn_at=None)
    if not turn.state.entered:
        turn.announce(*describe_unprotected(turn.state))


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


def advance_unprotected(turn: Turn) -> None:
    """Be protected, once every rank can be rehearsed and, where there are buddies, they hold what it takes."""
    if turn.state.buddies and not turn.state.committed:
        return
    tally = turn.state.seat_tally
    if not tally.unsealed and not tally.done:
        turn.enter(JobPhase.RUNNING, "every rank can be replaced from now on")
        turn.set(raises=blame.still_evidence(turn.state.raises))


def _begin(turn: Turn, reason: str) -> None:
    turn.enter(JobPhase.STARTING, reason)
    turn.set(
        seats=vacant_seats(turn.settings.world_size),
        capture_interval=turn.settings.capture_interval,
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
    turn.next_epoch()
    turn.effects.append(do.BeginGeneration(turn.state.generation))
