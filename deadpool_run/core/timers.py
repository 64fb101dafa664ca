"""What the passing of time leads to: every deadline of the state, and what is done when it is reached."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from deadpool_run.core import placement
from deadpool_run.core.copies import interval
from deadpool_run.core.decision import Decision
from deadpool_run.core.recovery import repair, restart, shutdown, spare_pool
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import Member, State
from deadpool_run.core.tallies import patience_from
from deadpool_run.core.transitions import AT_WORK_IN_REPAIR, TIMED, JobPhase, MemberPhase

SUSPICION_S = 5.0
"""After a collective failed by itself, the news of a loss is waited for so long."""
UNATTACHED_S = 2.0
"""After a member could not attach, the news of a loss is waited for so long."""
RAISED_S = 10.0
"""After a managed script raised, its process's exit is waited for so long (a thread or an exit handler may keep it)."""

UNWIND_S = 10.0
"""A run of the script that can be left at all is left within so long: code that is stuck in C++ cannot be."""

START_S = 300.0
"""A worker that the first step of a world waits for is ready within so long, however slow its imports are."""


class Due(StrEnum):
    """Why a deadline exists."""

    STUCK = "stuck"
    UNDRAINED = "undrained"
    UNWINDING = "unwinding"
    RAISED = "raised"
    UNATTACHED = "unattached"
    UNREAPED = "unreaped"
    NOT_STARTED = "not started"
    NOT_PREPARED = "not prepared"
    LINGERING = "lingering"
    SUSPICION = "suspicion"
    CALM = "calm"
    HEAL = "heal"
    SPARE_NODES = "spare nodes"
    NODES = "nodes"
    NO_PLACE = "no place"
    MOVED = "moved"
    UNPROTECTED = "unprotected"


@dataclass(frozen=True, slots=True)
class Deadline:
    """Something is due at this time; `member` is whom it is about."""

    at: float
    due: Due
    member: Member | None = None


def deadlines(settings: Settings, state: State) -> Iterator[Deadline]:
    """Yield every deadline of the state. Each ends by being met, so that time never stands still at one."""
    if state.phase is JobPhase.STOPPED:
        return
    if state.move is not None:
        yield Deadline(state.move.began_at + settings.node_timeout_s, Due.MOVED)
        return
    for member in _with_deadlines(state):
        found = _of_phase(settings, state, member.phase, patience_from(member))
        if found is not None:
            yield Deadline(*found, member)
    yield from _of_the_job(settings, state)


def earliest(settings: Settings, state: State) -> float | None:
    """Return the time of the first deadline of all; None if there is none.

    The members of a phase have the same patience; so only the one whose patience runs longest is looked at.
    """
    if state.phase is JobPhase.STOPPED:
        return None
    if state.move is not None:
        return state.move.began_at + settings.node_timeout_s
    first = [deadline.at for deadline in _of_the_job(settings, state)]
    lingering = state.done_at is not None and state.phase is JobPhase.FINISHING
    for phase, crowd in state.member_tally.phases.items():
        if phase not in TIMED and not lingering:
            continue
        found = _of_phase(settings, state, phase, crowd.times.first if crowd.times else 0.0)
        if found is not None:
            first.append(found[0])
    return min(first, default=None)


def _with_deadlines(state: State) -> list[Member]:
    """Return the members that may have any, oldest first."""
    if state.done_at is not None and state.phase is JobPhase.FINISHING:
        return list(state.members.values())
    return state.in_phase(*TIMED)


def _of_the_job(settings: Settings, state: State) -> Iterator[Deadline]:
    if state.suspicion is not None:
        yield Deadline(state.suspicion.at + SUSPICION_S, Due.SUSPICION)
    calm_at = interval.calm_deadline(settings, state)
    if calm_at is not None and state.phase is JobPhase.RUNNING:
        yield Deadline(calm_at, Due.CALM)
    heal_at = spare_pool.heal_deadline(settings, state)
    if heal_at is not None:
        yield Deadline(heal_at, Due.HEAL)
    if state.phase is JobPhase.UNPROTECTED and state.warn_at is not None:
        yield Deadline(state.warn_at, Due.UNPROTECTED)
    yield from _of_nodes(settings, state)


def _of_nodes(settings: Settings, state: State) -> Iterator[Deadline]:
    if state.phase is JobPhase.STARTING:
        begin_at = placement.spares_due(settings, state)
        if len(state.nodes) < settings.nodes:
            yield Deadline(state.joined_at + settings.join_timeout_s, Due.NODES)
        elif begin_at is not None and not state.spares_waited_for:
            yield Deadline(begin_at, Due.SPARE_NODES)
    if state.phase is JobPhase.REPAIRING and state.repair is not None and spare_pool.is_exhausted(settings, state):
        yield Deadline(max(state.repair.began_at, state.joined_at) + settings.join_timeout_s, Due.NO_PLACE)


def _of_phase(settings: Settings, state: State, phase: MemberPhase, since: float) -> tuple[float, Due] | None:  # noqa: C901 - one case for each phase
    """Return when and why something is due of a member of this phase whose patience runs since then."""
    repairing = state.phase is JobPhase.REPAIRING
    match phase:
        case MemberPhase.ENDING:
            found = since + shutdown.UNREAPED_S, Due.UNREAPED
        case MemberPhase.RAISED if state.managed:
            found = since + RAISED_S, Due.RAISED
        case MemberPhase.UNATTACHED if not state.count(MemberPhase.RAISED, MemberPhase.ENDING):
            # The first that could not attach is ended; its loss begins an epoch in which the others try again.
            found = since + UNATTACHED_S, Due.UNATTACHED
        case MemberPhase.STARTING if repairing and state.seat_tally.vacant and state.repair is not None:
            found = max(since, state.repair.began_at) + settings.repair_timeout_s, Due.NOT_STARTED
        case MemberPhase.PREPARING:
            found = since + START_S, Due.NOT_PREPARED
        case MemberPhase.STARTING if state.phase is JobPhase.STARTING:
            found = since + START_S, Due.NOT_STARTED
        case MemberPhase.DRAINING if repairing:
            found = since + min(settings.drain_timeout_s, settings.repair_timeout_s), Due.UNDRAINED
        case MemberPhase.UNWINDING if repairing:
            found = since + UNWIND_S, Due.UNWINDING
        case phase if repairing and phase in AT_WORK_IN_REPAIR:
            found = since + settings.repair_timeout_s, Due.STUCK
        case _ if state.done_at is not None and state.phase is JobPhase.FINISHING:
            found = state.done_at + settings.shutdown_timeout_s, Due.LINGERING
        case _:
            return None
    return found


def advance(decision: Decision) -> None:
    """Do everything that is due by now, the oldest first."""
    while True:
        due = [deadline for deadline in deadlines(decision.settings, decision.state) if deadline.at <= decision.now]
        if not due:
            return
        _do(decision, min(due, key=lambda deadline: deadline.at))


def _do(decision: Decision, deadline: Deadline) -> None:  # noqa: C901, PLR0912, PLR0915 - one case for each reason
    member = deadline.member
    settings = decision.settings
    match deadline.due:
        case Due.STUCK:
            assert member is not None
            _end(decision, member, f"no progress while {member.phase} for {settings.repair_timeout_s:g} s")
        case Due.UNDRAINED:
            assert member is not None
            _undrained(decision, member)
        case Due.UNWINDING:
            assert member is not None
            _end(
                decision, member, f"its run of the script could not be left within {UNWIND_S:g} s: it is not in Python"
            )
        case Due.RAISED:
            assert member is not None
            _end(decision, member, f"its script raised, but its process did not end within {RAISED_S:g} s")
        case Due.UNATTACHED:
            assert member is not None
            _end(decision, member, "it could not build its communicators, and nobody else was lost")
        case Due.UNREAPED:
            assert member is not None
            shutdown.unreaped(decision, member)
        case Due.NOT_STARTED:
            assert member is not None
            _end(decision, member, f"it was not ready {decision.now - member.since:.0f} s after it was ordered")
        case Due.NOT_PREPARED:
            assert member is not None
            spare_pool.unprepared(decision, f"worker {member.worker} had not rehearsed within {START_S:g} s")
            decision.kill(member.worker, "it had not rehearsed in time")
        case Due.LINGERING:
            assert member is not None
            _end(decision, member, "every rank has finished, and it has not exited")
        case Due.SUSPICION:
            _suspicion(decision)
        case Due.CALM:
            interval.calm(decision)
        case Due.HEAL:
            spare_pool.heal(decision)
        case Due.SPARE_NODES:
            decision.set(spares_waited_for=True)
        case Due.NODES:
            count = f"{len(decision.state.nodes)} of the {settings.nodes} nodes that the world needs are there"
            shutdown.stop(decision, 1, f"{count}, and no other came within {settings.join_timeout_s:g} s")
        case Due.MOVED:
            pass  # met in `takeover`, before anything else
        case Due.UNPROTECTED:
            restart.unprotected(decision)
        case Due.NO_PLACE:
            ranks = ", ".join(str(seat.rank) for seat in decision.state.vacant())
            left = f"every worker of the {len(decision.state.nodes)} nodes that are left holds another"
            waited = f"no other node came within {settings.join_timeout_s:g} s"
            shutdown.stop(decision, 1, f"no place is left for rank {ranks}: {left}, and {waited}")


def _end(decision: Decision, member: Member, why: str) -> None:
    who = f"rank {member.rank}, worker {member.worker}" if member.rank is not None else f"worker {member.worker}"
    decision.announce(f"ending {who}", why)
    decision.kill(member.worker, why)


def _undrained(decision: Decision, member: Member) -> None:
    why = f"no progress while {member.phase} for {decision.now - member.since:.0f} s"
    if repair.can_reenter(member):
        repair.reenter(decision, member, why)
    else:
        _end(decision, member, why)


def _suspicion(decision: Decision) -> None:
    suspicion = decision.state.suspicion
    assert suspicion is not None
    decision.set(suspicion=None)
    why = f"a collective of worker {suspicion.worker} failed, and nobody was lost: {suspicion.message}"
    match decision.state.phase:
        case JobPhase.RUNNING | JobPhase.REPAIRING:
            repair.retry(decision, why)
        case JobPhase.UNPROTECTED:
            restart.restart(decision, why)
        case _:
            pass
