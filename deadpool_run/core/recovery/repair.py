"""Repair of a loss: abort the survivors' steps, assign replacements, choose the version, restore, attach."""

from collections.abc import Sequence
from dataclasses import dataclass
from signal import SIGTERM

from msgspec.structs import replace

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core import placement, places
from deadpool_run.core.copies import holders
from deadpool_run.core.decision import Decision
from deadpool_run.core.members import Member
from deadpool_run.core.recovery import blame, incidents, restart, shutdown
from deadpool_run.core.state import Raise, Repair, all_attached
from deadpool_run.core.transitions import MEMBER_TRANSITIONS, JobPhase, MemberPhase
from deadpool_run.errors import Blame
from deadpool_run.ids import Rank, Version

_M = MemberPhase
_UNREPORTED = (_M.ABORTING, _M.RECALLED, _M.UNWINDING)
"""Phases of members that have yet to report what they hold."""


@dataclass(frozen=True, slots=True)
class LostRank:
    """A rank whose worker was lost, with the worker as it was. It is no member any more.

    `left` are the versions that its node holds; None if the node is lost too.
    """

    member: Member
    cause: str
    left: frozenset[Version] | None

    @property
    def why(self) -> str:
        """The loss in words."""
        return f"rank {self.member.rank} (worker {self.member.worker}) {self.cause}"


def lost(decision: Decision, fallen: Sequence[LostRank], why: str) -> None:
    """Repair the loss of these ranks. Ranks that are lost together count as one failed attempt."""
    repair = under_way(decision)
    repair.attempts += any(_is_attempt(repair, one.member) for one in fallen)
    for one in fallen:
        note_loss(decision, one)
    begin_epoch(decision, why)
    for one in fallen:  # after the epoch began, since answers name it
        _find_copies(decision, one)


def note_loss(decision: Decision, fallen: LostRank) -> None:
    """Note the loss in the repair, which it may begin."""
    member = fallen.member
    repair = under_way(decision)
    loss = do.Loss(member.held_rank, member.worker, fallen.cause, member.is_injected, planned=member.planned)
    repair.losses = (*repair.losses, loss)
    repair.lost_at[member.held_rank] = decision.now
    held = (*(fallen.left or ()), repair.dead_held)
    repair.dead_held = max((version for version in held if version is not None), default=None)
    if repair.detected_s is None and member.injected_at is not None:
        repair.detected_s = decision.now - member.injected_at


def under_way(decision: Decision) -> Repair:
    """Return the repair that is under way, or begin one."""
    repair = decision.state.repair = decision.state.repair or Repair(began_at=decision.now)
    return repair


def _is_attempt(repair: Repair, lost: Member) -> bool:
    """Tell whether the loss counts: the first one does, and one that ends an attempt with a replacement or a version."""
    if lost.is_injected or lost.blameless:
        return False
    return not repair.losses or lost.replacement or repair.resume is not None


def _find_copies(decision: Decision, fallen: LostRank) -> None:
    """Note or search for the rank's copies. Those of a replacement's rank are known already."""
    member = fallen.member
    if decision.state.phase is not JobPhase.REPAIRING or member.replacement:
        return
    if fallen.left is None:
        holders.ask(decision, member.held_rank)
    else:
        holders.left_behind(decision, member.held_rank, member.node, fallen.left)


def lost_after_release(decision: Decision, fallen: Sequence[LostRank], why: str) -> None:
    """Replace every rank at the last version, and have it run to its end again.

    Steps cannot be aborted any more, since they have left the loop. No step is trained twice. What the script does
    after its loop is repeated, so this counts as a restart.
    """
    state = decision.state
    which = restart.count(decision, why, possible=not state.seat_counters.unrehearsable)
    if not which:
        return
    decision.enter(JobPhase.REPAIRING, why)
    state.repair, state.done_at = Repair(began_at=decision.now), None
    for seat in state.seats:
        decision.set_seat(seat.rank, done=False)
    decision.announce(f"finishing again {which}", why)
    for owner in state.owners():
        if owner.phase is not _M.ENDING:
            decision.terminate(owner.worker, SIGTERM, why)
    lost(decision, fallen, why)


def begin_epoch(decision: Decision, reason: str, what: str = "repairing") -> None:
    """Recall every member to the next epoch; or stop the job if the repair is hopeless. `what` is done, in words."""
    decision.repair.retry_at = None
    decision.repair.unreached.clear()
    gone = ", ".join(str(seat.rank) for seat in decision.state.seats if seat.done)
    if gone:
        why = f"{reason}, and rank {gone} had left the job already, so the job cannot continue"
        shutdown.stop(decision, 1, why)
        return
    if decision.repair.attempts > blame.MAX_ATTEMPTS:
        limit = f"{blame.MAX_ATTEMPTS} attempts to repair it failed without one completed step"
        shutdown.stop(decision, 1, f"{reason}; {limit}")
        return
    if decision.state.phase is JobPhase.RUNNING:
        decision.enter(JobPhase.REPAIRING, reason)
    decision.next_epoch()
    decision.repair.resume = None
    for member in decision.state.owners():
        recall(decision, member)
    decision.announce(f"{what} towards epoch {decision.state.epoch}", reason)


def recall(decision: Decision, member: Member) -> None:
    """Order the member to abort its step and enter this epoch, and forget what it reported in an older one."""
    if not member.replacement:  # what a replacement's rank holds is known: its dead owner left it
        decision.set_seat(member.held_rank, held=None)
    if do.AbortStep in MEMBER_TRANSITIONS[member.phase]:
        decision.order(do.AbortStep(member.worker, decision.state.epoch), stepped=False, finished=None)


def aborted(decision: Decision, member: Member, event: ev.AbortCompleted) -> None:
    """Note what a survivor holds."""
    seat = decision.set_seat(member.held_rank, held=holders.held_by_survivor(event))
    if seat.copies or seat.asked:
        decision.set_seat(seat.rank, copies={}, asked=frozenset())
    _note_completed(decision, event.completed)


def _note_completed(decision: Decision, completed: Version) -> None:
    repair = decision.state.repair
    if repair is not None and (repair.completed is None or repair.completed < completed):
        repair.completed = completed


def abort_failed(decision: Decision, event: ev.AbortFailed) -> None:
    """Order the survivor to run its script again, if it can and has not failed at that before; else end it."""
    member = decision.concerned(event)
    if member is None:
        return
    if event.again and member.phase is _M.UNWINDING:
        return  # that was ordered already
    if event.kind and member.rank is not None and weigh(decision, blame.evidence(decision.state, member, event)):
        return
    why = f"its interrupted step could not be aborted: {event.message}"
    if event.again and can_reenter(member) and event.blame is not Blame.DEVICE:
        reenter(decision, member, why)
    else:
        decision.end(member, why)


def weigh(decision: Decision, new: Raise) -> bool:
    """Take an exception as evidence. If it proves that other workers would fail too, stop the job and return True."""
    known = decision.state.raises
    verdict = blame.judge(known, new)
    if new.blame is Blame.DEVICE:
        _avoid_device(decision, new)
    decision.state.raises = (*known, new)[-blame.MAX_EVIDENCE :]
    if not decision.state.managed:
        return False
    if verdict is None:
        if blame.is_first_of_ours(known, new):
            decision.announce(
                f"rank {new.rank} met an error of deadpool-run, not of the script", blame.named(new), ours=True
            )
        return False
    decision.announce(verdict.tracebacks, verdict.why, ours=verdict.ours)
    shutdown.stop(decision, 1, verdict.why)
    return True


def _avoid_device(decision: Decision, failed: Raise) -> None:
    node, local_rank = failed.place
    if not places.is_bad(decision.state, node, local_rank):
        places.condemn(decision.state, node, local_rank)
        where = f"GPU {local_rank} of node {decision.state.nodes[node].place.name}"
        decision.announce(f"{where} failed, and is avoided", blame.named(failed))


def can_reenter(member: Member) -> bool:
    """Tell whether a survivor whose step cannot be aborted may run its script again, instead of being replaced.

    One that got an injected fault may not: the user wants to see it replaced.
    """
    may_stay = member.injected_at is None and not (member.reentered or member.replacement)
    return may_stay and member.phase in (_M.ABORTING, _M.RECALLED, _M.RESTORING)


def reenter(decision: Decision, member: Member, why: str) -> None:
    """Have a survivor leave its run of the script and run it again from the top."""
    decision.repair.reentered |= {member.held_rank}
    decision.announce(f"rank {member.rank} (worker {member.worker}) runs its script again", why)
    decision.set_member(member.worker, reentered=True)
    decision.order(do.ReEnter(member.worker, decision.state.epoch))


def unwound(decision: Decision, member: Member, event: ev.RunUnwound) -> None:
    """Note the versions in the slots of a survivor that runs its script again: it can be restored to them."""
    holders.left_behind(decision, member.held_rank, member.node, frozenset(event.captured))
    _note_completed(decision, event.completed)


def advance(decision: Decision) -> None:
    """Take every step that the reports so far allow."""
    _fill_vacancies(decision)
    _choose_version(decision)
    if decision.state.phase is not JobPhase.REPAIRING:
        return
    _resume(decision)
    _attach(decision)
    if all_attached(decision.state):
        decision.repair.attached_at = decision.now
        holders.settled(decision)
        decision.enter(JobPhase.RUNNING, f"every rank is attached to epoch {decision.state.epoch}")


def report(decision: Decision) -> None:
    """Report the repair once every rank has completed a step, its loop or its script."""
    state = decision.state
    repair, counters = state.repair, state.seat_counters
    if repair is None or counters.vacant or state.member_counters.stepped + counters.done < len(state.seats):
        return
    incident = incidents.finished(repair, state.epoch, decision.now)
    state.repair = None
    state.raises = blame.still_evidence(state.raises)
    places.note_steps(state)
    for loss in repair.losses:
        replacement = None if loss.replacement is None else state.members.get(loss.replacement)
        if replacement is not None:
            state.crashes.pop(replacement.node, None)  # a worker from there has proved good
    state.incidents = (*state.incidents, incident)[-incidents.KEPT :]
    decision.effects.append(do.ReportIncident(incident))


def _fill_vacancies(decision: Decision) -> None:
    state = decision.state
    if not state.seat_counters.vacant or decision.repair.fetch_again_at is not None or _is_up_to_date(decision):
        return
    claimed = {member.claimed for member in state.members.values()} if state.member_counters.claiming else set()
    vacant = [seat for seat in state.vacant() if seat.rank not in claimed]
    # A rank waits until every node has answered, and one holds copies. Ranks of one node wait for one another: they go to
    # one node together.
    unknown = {seat.node for seat in vacant if seat.asked or not seat.copies}
    for seating in placement.replacements(state, [seat for seat in vacant if seat.node not in unknown]):
        source = holders.nearest(state.seats[seating.rank], seating.member, None)
        decision.assign(seating, replacement=True, transcript_from=source)
        replaced(decision, seating.rank, seating.member)
    if vacant and not state.seat_counters.vacant:
        decision.repair.promoted_at = decision.now


def _is_up_to_date(decision: Decision) -> bool:
    """Tell whether the last decision filled all vacancies that it could, and nothing has changed since."""
    changes = decision.changes
    return decision.phase_before is JobPhase.REPAIRING and not (
        changes.vacancies or changes.joined or changes.nodes_lost
    )


def replaced(decision: Decision, rank: Rank, member: Member) -> None:
    """Note the replacement for the rank's last loss."""
    repair = decision.repair
    losses = list(repair.losses)
    index = next((at for at in reversed(range(len(losses))) if losses[at].rank == rank), None)
    if index is None:
        return  # its worker was not lost: it had finished, and is to finish again
    from_spare = member.ready_at is not None and member.ready_at <= repair.lost_at[rank]
    losses[index] = replace(losses[index], replacement=member.worker, from_spare=from_spare)
    repair.losses = tuple(losses)
    reason = "a spare was ready" if from_spare else "no spare was ready, so it was started for the rank"
    decision.announce(f"worker {member.worker} takes rank {rank}", reason, detail=True)


def _choose_version(decision: Decision) -> None:
    """Choose the resume version once every rank's versions are known."""
    state, repair = decision.state, decision.repair
    if repair.resume is not None or state.seat_counters.unknown or state.count(*_UNREPORTED):
        return
    held = [seat.held for seat in state.seats if seat.held is not None]
    resume = holders.newest_common(held)
    if resume is None and state.buddies and holders.ask_too(decision):
        return
    repair.aborted_at = decision.now
    if resume is None:
        lost = holders.describe_loss(state)
        why = f"{lost}no version is held by every rank, so the job cannot continue: {holders.describe(state.seats)}"
        if decision.settings.durable:
            restart.end(decision, "starting the world again from the newest durable checkpoint", why)
        else:
            shutdown.stop(decision, 1, why)
        return
    repair.resume = resume
    if state.buddies:
        holders.resumed(decision, resume)
        decision.effects.append(do.DiscardAbove(state.epoch, resume))
    state.reason = f"version {resume} is the newest that every rank holds"


def _resume(decision: Decision) -> None:
    """Order the members that wait for the resume version to resume from it."""
    resume = decision.repair.resume
    if resume is None or decision.repair.fetch_again_at is not None:
        return
    for member in decision.state.in_phase(_M.ABORTED, _M.REHEARSED):
        seat = decision.state.seats[member.held_rank]
        source = holders.nearest(seat, member, resume)
        decision.order(do.ResumeFrom(member.worker, decision.state.epoch, resume, source))
        assert seat.held is not None
        decision.set_seat(member.held_rank, held=holders.held_after_resume(seat.held, resume))


def _attach(decision: Decision) -> None:
    """Order every member to attach once all are restored."""
    if decision.state.count(_M.RESTORED) < decision.settings.world_size:
        return
    decision.repair.restored_at = decision.now
    for member in decision.state.in_phase(_M.RESTORED):
        decision.order(do.AttachGroups(member.worker, decision.state.epoch), stepped=False)
