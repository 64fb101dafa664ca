"""Deadlines: how long a member may stay in a phase, how long the job may wait, and what is done then."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from deadpool_run.core import placement, places
from deadpool_run.core.copies import holders, interval, shortages
from deadpool_run.core.decision import Decision
from deadpool_run.core.members import Member
from deadpool_run.core.recovery import relocation, repair, restart, retries, shutdown, spare_pool
from deadpool_run.core.settings import Settings, more_to_attach_s
from deadpool_run.core.state import Repair, State
from deadpool_run.core.transitions import JobPhase, MemberPhase

SUSPICION_S = 5.0
"""How long the coordinator waits for news of a loss after a collective failed by itself."""
UNATTACHED_S = 2.0
"""How long the coordinator waits for news of a loss after a member could not attach."""
RAISED_S = 10.0
"""How long a process may live on after its managed script raised (a thread or an exit handler may keep it)."""
UNWIND_S = 10.0
"""How long a worker may take to leave its run of the script. Code that hangs in C++ cannot be left."""
START_S = 300.0
"""How long a worker of a new world may take to become ready. Imports may be slow."""


@dataclass(slots=True)
class Deadline:
    """A time, and what to do then."""

    at: float
    meet: Callable[[Decision], None]
    worker: float = float("inf")
    """Of deadlines at one time, that of the oldest worker is met first, and the job's own last."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a member may stay in a phase, and what is done then."""

    until: Callable[[Settings, State, float], float | None]
    """Returns the end of the time that began at the third argument; None if there is no limit in this state."""
    expired: Callable[[Decision, Member], None]


def next_deadline(settings: Settings, state: State) -> float | None:
    """Return when `TimeAdvanced` is due, if nothing else happens before; None if time changes nothing."""
    return min((deadline.at for deadline in _deadlines(settings, state)), default=None)


def advance(decision: Decision) -> None:
    """Meet every deadline up to now, the oldest first. A deadline that was met is not due again."""
    while True:
        due = [one for one in _deadlines(decision.settings, decision.state) if one.at <= decision.now]
        if not due:
            return
        min(due, key=lambda one: (one.at, one.worker)).meet(decision)


def _deadlines(settings: Settings, state: State) -> Iterator[Deadline]:
    """Yield the first deadline of each phase that members are in, and the job's own."""
    if state.phase is JobPhase.STOPPED:
        return
    if state.move is not None:
        # `takeover` meets this one before anything else is decided.
        yield Deadline(state.move.began_at + settings.node_timeout_s, lambda _decision: None)
        return
    linger_until = None
    if state.done_at is not None and state.phase is JobPhase.FINISHING:
        linger_until = state.done_at + settings.shutdown_timeout_s
    for phase in state.member_counters.by_phase:
        yield from _of_phase(settings, state, phase, linger_until)
    yield from _of_job(settings, state)


def _of_phase(settings: Settings, state: State, phase: MemberPhase, linger_until: float | None) -> Iterator[Deadline]:
    """Yield the first deadline of the phase's members. They have one limit, so it is that of the member longest in it."""
    limit = LIMITS.get(phase)
    member = None if limit is None else state.member_counters.longest_waiting(phase)
    if limit is not None and member is not None:
        until = limit.until(settings, state, member.patience_from)
        if until is not None:
            yield Deadline(until, lambda decision: limit.expired(decision, member), member.worker)
            return
    if linger_until is not None:
        oldest = state.members[min(state.member_counters.by_phase[phase])]
        yield Deadline(linger_until, lambda decision: _lingering(decision, oldest), oldest.worker)


# --- members --------------------------------------------------------------------------------------------------------


def _always(seconds: float) -> Callable[[Settings, State, float], float | None]:
    return lambda _settings, _state, since: since + seconds


def _in_repair(seconds: Callable[[Settings], float]) -> Callable[[Settings, State, float], float | None]:
    return lambda settings, state, since: since + seconds(settings) if state.phase is JobPhase.REPAIRING else None


def _until_unattached(_settings: Settings, state: State, since: float) -> float | None:
    if state.count(MemberPhase.RAISED, MemberPhase.ENDING):
        return None  # the loss of that member begins an epoch, in which the others try again
    return None if state.repair is None or state.repair.retry_at is not None else since + UNATTACHED_S


def _until_started(settings: Settings, state: State, since: float) -> float | None:
    if state.phase is JobPhase.STARTING:
        return since + START_S
    if state.phase is JobPhase.REPAIRING and state.repair is not None and state.seat_counters.vacant:
        return max(since, state.repair.began_at) + settings.repair_timeout_s
    return None


def _ended(why: str) -> Callable[[Decision, Member], None]:
    return lambda decision, member: decision.end(member, why)


def _stuck_after(seconds: Callable[[Settings], float]) -> Limit:
    def end(decision: Decision, member: Member) -> None:
        decision.end(member, f"no progress while {member.phase} for {seconds(decision.settings):g} s")

    return Limit(_in_repair(seconds), end)


def _not_started(decision: Decision, member: Member) -> None:
    places.note_never_ready(decision.state, member.node)
    decision.end(member, f"it was not ready {decision.now - member.since:.0f} s after it was ordered")


def _not_prepared(decision: Decision, member: Member) -> None:
    spare_pool.unprepared(decision, f"worker {member.worker} had not rehearsed within {START_S:g} s")
    decision.kill(member.worker, "it had not rehearsed in time")


def _not_aborted(decision: Decision, member: Member) -> None:
    why = f"no progress while {member.phase} for {decision.now - member.since:.0f} s"
    if repair.can_reenter(member):
        repair.reenter(decision, member, why)
    else:
        decision.end(member, why)


_lingering = _ended("every rank has finished, and it has not exited")
_STUCK = _stuck_after(lambda settings: settings.repair_timeout_s)

LIMITS: Mapping[MemberPhase, Limit] = {
    MemberPhase.STARTING: Limit(_until_started, _not_started),
    MemberPhase.PREPARING: Limit(_always(START_S), _not_prepared),
    MemberPhase.ABORTING: Limit(
        _in_repair(lambda settings: min(settings.abort_timeout_s, settings.repair_timeout_s)),
        _not_aborted,
    ),
    MemberPhase.RECALLED: _STUCK,
    MemberPhase.UNWINDING: Limit(
        _in_repair(lambda _settings: UNWIND_S),
        _ended(f"it could not leave its run of the script within {UNWIND_S:g} s: it is not in Python code"),
    ),
    MemberPhase.RE_ENTERING: _STUCK,
    MemberPhase.REHEARSING: _STUCK,
    MemberPhase.RESTORING: _STUCK,
    MemberPhase.ATTACHING: _stuck_after(
        lambda settings: settings.repair_timeout_s + more_to_attach_s(settings.world_size)
    ),
    MemberPhase.UNATTACHED: Limit(_until_unattached, retries.attach_failed),
    MemberPhase.RAISED: Limit(
        lambda _settings, state, since: since + RAISED_S if state.managed else None,
        _ended(f"its script raised, but its process did not end within {RAISED_S:g} s"),
    ),
    MemberPhase.ENDING: Limit(_always(shutdown.UNREAPED_S), shutdown.unreaped),
}
"""The phases with a time limit."""

# --- the job --------------------------------------------------------------------------------------------------------


def _of_job(settings: Settings, state: State) -> Iterator[Deadline]:
    if state.suspicion is not None:
        yield Deadline(state.suspicion.at + SUSPICION_S, _suspicion)
    is_longer = state.capture_interval > settings.capture_interval
    if is_longer and state.skipped_at is not None and state.phase is JobPhase.RUNNING:
        yield Deadline(state.skipped_at + interval.calm_s(settings, state), interval.calm)
    for at, meet in (
        (shortages.next_deadline(state), shortages.avoid),
        (relocation.next_deadline(settings, state), relocation.overdue),
        (spare_pool.heal_deadline(settings, state), spare_pool.heal),
    ):
        if at is not None:
            yield Deadline(at, meet)
    if state.phase is JobPhase.SETTING_UP and state.warn_at is not None:
        yield Deadline(state.warn_at, restart.protection_overdue)
    if state.phase is JobPhase.STARTING:
        begin_at = placement.spares_due(settings, state)
        if len(state.nodes) < settings.nodes:
            yield Deadline(state.joined_at + settings.join_timeout_s, _too_few_nodes)
        elif begin_at is not None:
            yield Deadline(begin_at, _begin_without_spares)
    if state.phase is JobPhase.REPAIRING and state.repair is not None:
        yield from _of_repair(settings, state, state.repair)


def _of_repair(settings: Settings, state: State, under_way: Repair) -> Iterator[Deadline]:
    if under_way.retry_at is not None:
        yield Deadline(under_way.retry_at, _connect_again)
    if under_way.fetch_again_at is not None:
        yield Deadline(under_way.fetch_again_at, retries.fetch_again)
    if under_way.asked_at is not None:
        yield Deadline(under_way.asked_at + settings.repair_timeout_s, holders.give_up)
    if spare_pool.is_exhausted(settings, state):
        yield Deadline(max(under_way.began_at, state.joined_at) + settings.join_timeout_s, _no_place)


def _connect_again(decision: Decision) -> None:
    decision.repair.retry_at = None
    retries.retry(decision, retries.unconnected(decision.repair))


def _suspicion(decision: Decision) -> None:
    suspicion = decision.state.suspicion
    assert suspicion is not None
    decision.state.suspicion = None
    why = f"a collective of worker {suspicion.worker} failed, but no worker was lost: {suspicion.message}"
    if decision.state.phase in (JobPhase.RUNNING, JobPhase.REPAIRING):
        retries.retry(decision, why)
    elif decision.state.phase is JobPhase.SETTING_UP:
        restart.restart(decision, why)


def _begin_without_spares(decision: Decision) -> None:
    decision.state.spares_waited_for = True


def _too_few_nodes(decision: Decision) -> None:
    settings = decision.settings
    count = f"{len(decision.state.nodes)} of the {settings.nodes} nodes that the world needs have joined"
    shutdown.stop(decision, 1, f"{count}, and no other came within {settings.join_timeout_s:g} s")


def _no_place(decision: Decision) -> None:
    ranks = ", ".join(str(seat.rank) for seat in decision.state.vacant())
    left = f"every worker of the {len(decision.state.nodes)} remaining nodes holds another rank"
    waited = f"no other node came within {decision.settings.join_timeout_s:g} s"
    shutdown.stop(decision, 1, f"no place is left for rank {ranks}: {left}, and {waited}")
