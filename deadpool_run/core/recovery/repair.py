"""The repair of a loss: free and drain the survivors, seat the newcomers, choose the version, restore, attach."""

from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGTERM

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core import placement
from deadpool_run.core.changes import changed
from deadpool_run.core.copies import holders, replicas
from deadpool_run.core.recovery import blame, incidents, restart, shutdown
from deadpool_run.core.state import LossSoFar, Member, Raise, Repair, all_attached
from deadpool_run.core.transitions import MEMBER_TRANSITIONS, JobPhase, MemberPhase
from deadpool_run.core.turn import Turn
from deadpool_run.ids import Rank, Version

_M = MemberPhase
_UNSAID = (_M.DRAINING, _M.RECALLED, _M.UNWINDING)
"""Phases of members that will say what they hold."""


@dataclass(frozen=True, slots=True)
class Fallen:
    """A rank's worker that was lost: as it was before its end. It was removed from the members already.

    `left` are the versions that its node holds; None if the node is lost with it.
    """

    member: Member
    cause: str
    left: frozenset[Version] | None

    @property
    def why(self) -> str:
        """The loss in words."""
        return f"rank {self.member.rank} (worker {self.member.worker}) {self.cause}"


def lost(turn: Turn, fallen: Sequence[Fallen], why: str) -> None:
    """Repair the loss of these ranks' workers, lost at once: however many they are, one attempt has failed."""
    repair = turn.state.repair or Repair(began_at=turn.now)
    counts = any(_is_attempt(repair, one.member) for one in fallen)
    turn.set(repair=changed(repair, attempts=repair.attempts + counts))
    for one in fallen:
        note_loss(turn, one)
    begin_epoch(turn, why)
    for one in fallen:  # in the new epoch, which the answers name
        _find_copies(turn, one)


def note_loss(turn: Turn, fallen: Fallen) -> None:
    """Note it in the incident, which it may begin."""
    member = fallen.member
    assert member.rank is not None
    repair = turn.state.repair or Repair(began_at=turn.now)
    injected = member.injected_at is not None
    detected_s = None if member.injected_at is None else turn.now - member.injected_at
    held = (*(fallen.left or ()), repair.dead_held)
    turn.set(
        repair=changed(
            repair,
            losses=(*repair.losses, LossSoFar(member.rank, member.worker, fallen.cause, injected, turn.now)),
            dead_held=max((version for version in held if version is not None), default=None),
            detected_s=detected_s if repair.detected_s is None else repair.detected_s,
        )
    )


def _is_attempt(repair: Repair, lost: Member) -> bool:
    """Tell whether the loss begins an attempt, or ends one that had gone somewhere; what a user injects does neither."""
    if lost.injected_at is not None or lost.blameless:
        return False
    return not repair.losses or lost.newcomer or repair.resume is not None


def _find_copies(turn: Turn, fallen: Fallen) -> None:
    """Note or ask who holds the rank's state; what a newcomer was to be given is known already."""
    member = fallen.member
    assert member.rank is not None
    if turn.state.phase is not JobPhase.REPAIRING or member.newcomer:
        return
    if fallen.left is None:
        holders.ask(turn, member.rank)
    else:
        holders.left_behind(turn, member.rank, member.node, fallen.left)


def lost_after_release(turn: Turn, fallen: Sequence[Fallen], why: str) -> None:
    """Have every rank come back as a newcomer at the last version, and run to its end again.

    Survivors cannot be drained any more: they run code of their own. Nothing is trained twice; what the script does
    after its loop is, so that this is bounded as restarts of the world are.
    """
    state = turn.state
    allowed = restart.restarts_allowed(turn.settings, state)
    if state.restarts >= allowed or not all(seat.sealed for seat in state.seats):
        shutdown.stop(turn, 1, f"{why}{restart.describe_limit(state, allowed)}")
        return
    turn.enter(JobPhase.REPAIRING, why)
    turn.set(repair=Repair(began_at=turn.now), restarts=state.restarts + 1, done_at=None)
    with turn.for_all():
        for seat in state.seats:
            turn.set_seat(seat.rank, done=False)
    turn.announce(f"finishing again ({turn.state.restarts} of at most {allowed})", why)
    with turn.for_all():
        for owner in state.owners():
            if owner.phase is not _M.ENDING:
                turn.terminate(owner.worker, SIGTERM, why)
    lost(turn, fallen, why)


def retry(turn: Turn, reason: str) -> None:
    """Begin an epoch that replaces nobody."""
    repair = turn.state.repair or Repair(began_at=turn.now)
    turn.set(repair=changed(repair, attempts=repair.attempts + 1))
    begin_epoch(turn, reason)


def begin_epoch(turn: Turn, reason: str) -> None:
    """Recall every member to the next epoch; or stop, where that is hopeless."""
    assert turn.state.repair is not None
    gone = ", ".join(str(seat.rank) for seat in turn.state.seats if seat.done)
    if gone:
        shutdown.stop(turn, 1, f"{reason}, and rank {gone} had left the job already, so that nobody can go on with it")
        return
    if turn.state.repair.attempts > blame.MAX_ATTEMPTS:
        limit = f"{blame.MAX_ATTEMPTS} attempts to repair it failed without one completed step"
        shutdown.stop(turn, 1, f"{reason}; {limit}")
        return
    if turn.state.phase is JobPhase.RUNNING:
        turn.enter(JobPhase.REPAIRING, reason)
    turn.next_epoch()
    turn.set_repair(resume=None)
    owners = list(turn.state.owners())
    with turn.for_all():
        for member in owners:
            recall(turn, member)
    turn.announce(f"repairing towards epoch {turn.state.epoch}", reason)


def recall(turn: Turn, member: Member) -> None:
    """Have the member drain towards this epoch, and forget what it acknowledged in an older one."""
    assert member.rank is not None
    if not member.newcomer:  # a newcomer's rank still holds what its dead owner left
        turn.set_seat(member.rank, held=None)
    if do.AbortStep in MEMBER_TRANSITIONS[member.phase]:
        turn.set_member(member.worker, stepped=False, finished=None)
        turn.order(do.AbortStep(member.worker, turn.state.epoch))


def drained(turn: Turn, member: Member, event: ev.SurvivorDrained) -> None:
    """Note what a survivor holds."""
    assert member.rank is not None
    turn.set_seat(member.rank, held=replicas.held_by_survivor(event), copies={}, asked=frozenset())
    _note_completed(turn, event.completed)


def _note_completed(turn: Turn, completed: Version) -> None:
    repair = turn.state.repair
    if repair is not None and (repair.completed is None or repair.completed < completed):
        turn.set_repair(completed=completed)


def drain_failed(turn: Turn, event: ev.DrainFailed) -> None:
    """Have the survivor run its script again, if it can and has not tried that in vain; else end it."""
    member = turn.state.members.get(event.worker)
    if member is None or not turn.obeys(event.worker, event):
        return
    if event.again and member.phase is _M.UNWINDING:
        return  # it was told so already
    if event.kind and member.rank is not None and weigh(turn, blame.evidence(turn.state, member, event)):
        return
    why = f"its interrupted step could not be drained: {event.message}"
    if event.again and can_reenter(member):
        reenter(turn, member, why)
        return
    turn.announce(f"ending rank {member.rank}", why)
    turn.kill(event.worker, why)


def weigh(turn: Turn, new: Raise) -> bool:
    """Take an exception as evidence; stop, and return True, if it proves that another worker would do no better."""
    known = turn.state.raises
    verdict = blame.judge(known, new)
    turn.set(raises=(*known, new)[-blame.MAX_EVIDENCE :])
    if not turn.state.managed:
        return False
    if verdict is None:
        if blame.is_first_of_ours(known, new):
            turn.announce(
                f"rank {new.rank} met an error of deadpool-run, not of the script", blame.named(new), ours=True
            )
        return False
    turn.announce(verdict.tracebacks, verdict.why, ours=verdict.ours)
    shutdown.stop(turn, 1, verdict.why)
    return True


def can_reenter(member: Member) -> bool:
    """Tell whether a survivor that cannot be drained may run its script again, instead of being replaced."""
    return member.phase in (_M.DRAINING, _M.RECALLED, _M.RESTORING) and not (member.reentered or member.newcomer)


def reenter(turn: Turn, member: Member, why: str) -> None:
    """Have a survivor leave its run of the script and run it again from the top."""
    assert member.rank is not None
    repair = turn.state.repair
    assert repair is not None
    turn.set_repair(reentered=repair.reentered | {member.rank})
    turn.announce(f"rank {member.rank} (worker {member.worker}) runs its script again", why)
    turn.set_member(member.worker, reentered=True)
    turn.order(do.ReEnter(member.worker, turn.state.epoch))


def unwound(turn: Turn, member: Member, event: ev.RunUnwound) -> None:
    """Note what a survivor that re-enters can be brought to: what its slots hold, like a dead owner's."""
    assert member.rank is not None
    holders.left_behind(turn, member.rank, member.node, frozenset(event.captured))
    _note_completed(turn, event.completed)


def advance(turn: Turn) -> None:
    """Do all that the facts known by now allow."""
    _fill_vacancies(turn)
    _choose_version(turn)
    if turn.state.phase is not JobPhase.REPAIRING:
        return
    _resume(turn)
    _attach(turn)
    if all_attached(turn.state):
        turn.set_repair(attached_at=turn.now)
        holders.settled(turn)
        turn.enter(JobPhase.RUNNING, f"every rank is attached to epoch {turn.state.epoch}")


def report(turn: Turn) -> None:
    """End the incident once every rank has completed a step (or its loop, or its script)."""
    repair = turn.state.repair
    if repair is None:
        return
    tally = turn.state.seat_tally
    if tally.vacant or turn.state.member_tally.stepped + tally.done < len(turn.state.seats):
        return
    incident = incidents.finished(repair, turn.state.epoch, turn.now)
    turn.set(
        repair=None,
        raises=blame.still_evidence(turn.state.raises),
        crashes=() if repair.losses else turn.state.crashes,  # a worker that was started has proved good
        incidents=(*turn.state.incidents, incident)[-incidents.KEPT :],
    )
    turn.effects.append(do.ReportIncident(incident))


def _fill_vacancies(turn: Turn) -> None:
    if not turn.state.seat_tally.vacant or _is_as_it_was(turn):
        return
    claiming = turn.state.member_tally.claiming
    claimed = {member.claimed for member in turn.state.members.values()} if claiming else set()
    vacant = [seat for seat in turn.state.vacant() if seat.rank not in claimed]
    unknown = {seat.node for seat in vacant if not holders.is_known(seat)}  # ranks that lived together go together
    for seating in placement.replacements(turn.state, [seat for seat in vacant if seat.node not in unknown]):
        seat = turn.state.seats[seating.rank]
        turn.assign(seating, newcomer=True, transcript_from=holders.nearest(seat, seating.member, None))
        replaced(turn, seating.rank, seating.member)
    if vacant and not turn.state.vacant():
        turn.set_repair(promoted_at=turn.now)


def _is_as_it_was(turn: Turn) -> bool:
    """Tell whether vacancies were filled as far as possible at the end of the last decision, and nothing is new."""
    before, state = turn.before, turn.state
    return (
        before.phase is JobPhase.REPAIRING
        and state.nodes is before.nodes
        and state.seat_tally.vacant is before.seat_tally.vacant
        and state.seat_tally.sought is before.seat_tally.sought
        and state.member_tally.claiming == before.member_tally.claiming
        and state.member_tally.phases.get(_M.READY) is before.member_tally.phases.get(_M.READY)
    )


def replaced(turn: Turn, rank: Rank, member: Member) -> None:
    """Note who takes the place of the rank's last loss."""
    repair = turn.state.repair
    assert repair is not None
    losses = list(repair.losses)
    index = next((at for at in reversed(range(len(losses))) if losses[at].rank == rank), None)
    if index is None:
        return  # its worker was not lost: it had finished, and finishes again
    from_spare = member.ready_at is not None and member.ready_at <= losses[index].at
    losses[index] = changed(losses[index], replacement=member.worker, from_spare=from_spare)
    turn.set_repair(losses=tuple(losses))
    reason = "a spare was ready" if from_spare else "no spare was ready, so that it was started for the rank"
    turn.announce(f"worker {member.worker} takes rank {rank}", reason)


def _choose_version(turn: Turn) -> None:
    """Choose the resume version once it is known what every rank holds."""
    state, repair = turn.state, turn.state.repair
    assert repair is not None
    if repair.resume is not None or state.seat_tally.unknown or state.count(*_UNSAID):
        return
    held = [seat.held for seat in state.seats if seat.held is not None]
    resume = replicas.newest_common(held)
    turn.set_repair(drained_at=turn.now)
    if resume is None:
        lost = holders.describe_loss(state)
        why = f"{lost}no version is held by every rank, so nobody can go on: {replicas.describe(state.seats)}"
        if turn.settings.durable:
            restart.end(turn, "starting the world again from the newest durable checkpoint", why)
        else:
            shutdown.stop(turn, 1, why)
        return
    turn.set_repair(resume=resume)
    if state.buddies:
        holders.resumed(turn, resume)
        turn.effects.append(do.DiscardAbove(state.epoch, resume))
    turn.set(reason=f"version {resume} is the newest that every rank holds")


def _resume(turn: Turn) -> None:
    """Tell the version to each member that waits for it."""
    repair = turn.state.repair
    assert repair is not None
    if repair.resume is None:
        return
    waiting = turn.state.in_phase(_M.DRAINED, _M.REHEARSED)
    if not waiting:
        return
    with turn.for_all():
        for member in waiting:
            assert member.rank is not None
            seat = turn.state.seats[member.rank]
            source = holders.nearest(seat, member, repair.resume) if member.newcomer else None
            turn.order(do.ResumeFrom(member.worker, turn.state.epoch, repair.resume, source))
            held = seat.held
            assert held is not None
            turn.set_seat(member.rank, held=replicas.held_after_resume(held, repair.resume))


def _attach(turn: Turn) -> None:
    """Have all attach once all are restored."""
    if turn.state.count(_M.RESTORED) < turn.settings.world_size:
        return
    turn.set_repair(restored_at=turn.now)
    restored = turn.state.in_phase(_M.RESTORED)
    with turn.for_all():
        for member in restored:
            turn.set_member(member.worker, stepped=False)
            turn.order(do.AttachGroups(member.worker, turn.state.epoch))
