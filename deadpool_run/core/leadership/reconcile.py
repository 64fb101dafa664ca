"""Reconciliation after a takeover: the recorded workers against those that the nodes found.

Each rank keeps one owner: of all workers that were given it, dead ones included, the one of the largest epoch. Any other is
ended, and its rank is not given away before its end.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from signal import SIGTERM

from deadpool_run.core import effects as do
from deadpool_run.core import placement
from deadpool_run.core.copies import holders
from deadpool_run.core.decision import Decision
from deadpool_run.core.found import Discards, WorkerFound
from deadpool_run.core.injection import KillHow
from deadpool_run.core.members import NO_EPOCH, Member
from deadpool_run.core.recovery import repair, restart, shutdown, spare_pool
from deadpool_run.core.recovery.repair import LostRank
from deadpool_run.core.state import Repair
from deadpool_run.core.transitions import PARKED, JobPhase, MemberPhase
from deadpool_run.ids import NodeId, Rank, WorkerId

_REPAIRED_IN = frozenset({JobPhase.RUNNING, JobPhase.REPAIRING})
_OUTDATED = "it was given its rank by another coordinator, and is not needed"
_PREPARED = "it rehearsed for another coordinator, and cannot report its progress"
_OF_THE_LAST_STORE = "it was setting up with the last coordinator's store, which is gone"


@dataclass(frozen=True, slots=True)
class RankClaim:
    """A worker that was given a rank, on any node and by any coordinator."""

    node: NodeId
    found: WorkerFound


@dataclass(frozen=True, slots=True)
class Truth:
    """The inventories of the nodes, compared with the records.

    `fallen` are the ranks' workers that are gone, `unrecorded` the living workers that were given a rank without its being
    known, and `found` every worker that is there, or was.
    """

    fallen: Sequence[LostRank]
    unrecorded: Sequence[RankClaim]
    found: Mapping[WorkerId, WorkerFound]


def compare(decision: Decision, found: Mapping[NodeId, Sequence[WorkerFound]], lost: Sequence[Member]) -> Truth:
    """Bring the members in line with what the nodes found. `lost` are the members of lost nodes."""
    everyone = {each.worker: RankClaim(node, each) for node, workers in found.items() for each in workers}
    if any(claim.found.initialized for claim in everyone.values()):
        decision.state.managed = True
    fallen = [LostRank(member, f"was lost with node {member.node}", None) for member in lost if member.rank is not None]
    for member in list(decision.state.members.values()):
        claim = everyone.get(member.worker)
        if claim is None or not claim.found.alive:
            fallen += _gone(decision, member, None if claim is None else claim.found)
        else:
            _is_there(decision, member, claim.found)
    claims: dict[int, list[RankClaim]] = {}
    for claim in everyone.values():
        claims.setdefault(claim.found.rank, []).append(claim)
    settled = [
        _settle_rank(decision, Rank(rank), claims.get(rank, []), fallen) for rank in range(decision.settings.world_size)
    ]
    unrecorded = [claim for claim in settled if claim is not None]
    for claim in everyone.values():
        if claim.found.alive and claim.found.rank < 0 and claim.found.worker not in decision.state.members:
            end_orphan(decision, claim)
    return Truth(fallen, unrecorded, {worker: claim.found for worker, claim in everyone.items()})


def end_orphan(decision: Decision, claim: RankClaim, why: str = _OUTDATED) -> None:
    """End a worker that is not its rank's owner; the rank waits for its end."""
    found = claim.found
    rank = Rank(found.rank) if found.rank >= 0 else None
    member = _member_of(decision, claim, MemberPhase.STARTING)
    if member.rank is not None:
        decision.set_seat(member.rank, owner=None)
    decision.set_member(found.worker, rank=None, replacement=False, claimed=rank)
    decision.kill(found.worker, why)


def _member_of(decision: Decision, claim: RankClaim, phase: MemberPhase) -> Member:
    """Return the record of a found worker; a new one, in this phase, if there was none."""
    member = decision.state.members.get(claim.found.worker)
    if member is None:
        member = Member(claim.found.worker, claim.node, phase, decision.now, pid=claim.found.pid)
        decision.add_member(member)
    return member


def go_on(decision: Decision, truth: Truth, discards: Discards, why: str) -> None:
    """Resume the job from what the nodes found."""
    if decision.state.phase in _REPAIRED_IN and any(found.released for found in truth.found.values()):
        truth = _was_finishing(decision, truth)
    match decision.state.phase:
        case JobPhase.RUNNING | JobPhase.REPAIRING:
            _repair(decision, truth, discards, why)
        case JobPhase.FINISHING:
            _finish(decision, truth, discards, why)
        case JobPhase.STARTING | JobPhase.SETTING_UP | JobPhase.RESTARTING:
            _begin_again(decision, truth, why)
        case JobPhase.NEW | JobPhase.STOPPING | JobPhase.STOPPED:
            _end_orphans(decision, truth.unrecorded)
    _end_again(decision)


def _gone(decision: Decision, member: Member, found: WorkerFound | None) -> list[LostRank]:
    """Forget a worker that ended, or never started."""
    decision.remove(member)
    if member.rank is None:
        return []
    chose_to = member.phase not in (MemberPhase.ENDING, MemberPhase.RAISED)
    if found is not None and found.code == 0 and chose_to:
        decision.set_seat(member.rank, done=True)
        return []
    how = "ended" if found is None else shutdown.describe_exit(found.code, found.signal)
    return [LostRank(member, f"{how} while the coordinator moved", None)]


def _is_there(decision: Decision, member: Member, found: WorkerFound) -> None:
    if member.pid != found.pid:
        decision.set_member(member.worker, pid=found.pid)
    if member.phase is MemberPhase.ENDING:
        return
    if member.rank is not None and found.rank < 0:  # the order that gave it its rank never arrived
        decision.set_seat(member.rank, owner=None)
        decision.set_member(member.worker, rank=None, replacement=False, phase=MemberPhase.READY, since=decision.now)
    elif member.phase in PARKED and found.dismissed:
        decision.set_member(member.worker, phase=MemberPhase.DISMISSED, since=decision.now)
    elif member.phase in PARKED and found.prepared and not _has_rehearsed(member):
        decision.kill(member.worker, _PREPARED)
    elif member.phase is MemberPhase.PREPARING:  # the order never arrived, or the spare is parked again
        decision.set_member(member.worker, phase=MemberPhase.READY, prepared=None, place=None, since=decision.now)
    elif member.phase is MemberPhase.STARTING and found.ready:
        decision.set_member(member.worker, phase=MemberPhase.READY, since=decision.now, ready_at=decision.now)


def _has_rehearsed(member: Member) -> bool:
    """Tell whether the log has the spare's report that it rehearsed, and so as which rank."""
    return member.phase is MemberPhase.READY and member.prepared is not None


def _settle_rank(
    decision: Decision, rank: Rank, claims: Sequence[RankClaim], fallen: list[LostRank]
) -> RankClaim | None:
    """End all that were given the rank but the last; return that one if it lives and was not known for its owner."""
    mine = sorted(claims, key=lambda claim: claim.found.epoch)
    if not mine:
        return None
    owner, last = decision.state.owner(rank), mine[-1]
    for claim in mine[:-1]:
        if claim.found.alive:
            if owner is not None and claim.found.worker == owner.worker:
                fallen.append(LostRank(copy(owner), "was replaced before the coordinator moved", None))
            end_orphan(decision, claim)
    if not last.found.alive:
        if last.found.code == 0 and decision.state.seats[rank].owner is None and last.found.released:
            decision.set_seat(rank, done=True)
        return None
    known = decision.state.members.get(last.found.worker)
    if known is not None and (known.rank == rank or known.phase is MemberPhase.ENDING):
        if known.rank != rank:
            end_orphan(decision, last)
        return None
    return last


def _repair(decision: Decision, truth: Truth, discards: Discards, why: str) -> None:
    """Recall every member to one epoch, and ask again which nodes hold copies of the ranks whose owners are gone."""
    decision.state.repair = decision.state.repair or Repair(began_at=decision.now)
    for one in truth.fallen:
        repair.note_loss(decision, one)  # which is no attempt: it is the coordinator's node that failed, not the repair
    for claim in truth.unrecorded:
        owner = _adopt(decision, claim, MemberPhase.REHEARSING)
        repair.replaced(decision, owner.held_rank, owner)
    _end_unrehearsed(decision, truth)
    _end_surplus(decision)
    repair.begin_epoch(decision, why)
    if decision.state.phase is not JobPhase.REPAIRING:
        return
    _discard(decision, discards)
    for seat in decision.state.seats:
        if seat.owner is None or decision.state.members[seat.owner].replacement:
            holders.ask(decision, seat.rank)
    interval = decision.state.capture_interval
    for member in decision.state.owners():
        if truth.found[member.worker].interval != interval:
            decision.effects.append(do.SetCaptureInterval(member.worker, interval))


def _end_unrehearsed(decision: Decision, truth: Truth) -> None:
    """End replacements that set up with a store that is gone: they would wait for it. Others take their ranks at once."""
    for member in list(decision.state.owners()):
        if member.phase is MemberPhase.ENDING:
            continue
        found = truth.found[member.worker]
        sets_up = member.replacement and member.phase in (MemberPhase.REHEARSING, MemberPhase.RE_ENTERING)
        if not found.rehearsed and (found.reentering or sets_up):
            end_orphan(decision, RankClaim(member.node, found), _OF_THE_LAST_STORE)
        elif found.reentering:  # it waits for its state, whatever was known of that
            decision.set_member(member.worker, phase=MemberPhase.REHEARSING, replacement=True, since=decision.now)
        elif member.phase is MemberPhase.UNWINDING:  # the order to do so never arrived
            decision.set_member(member.worker, phase=MemberPhase.ABORTING, reentered=False, since=decision.now)


def _end_surplus(decision: Decision) -> None:
    """End parked workers for which a node has no room: the last coordinator had ended them, and started others."""
    for node, room in list(spare_pool.rooms(decision.settings, decision.state, decision.state.nodes.keys())):
        on_node = [member for member in decision.state.on_node(node) if member.phase is not MemberPhase.ENDING]
        surplus = len(on_node) - room
        parked = [member for member in on_node if member.phase in PARKED]
        for member in parked[: max(0, surplus)]:
            decision.kill(member.worker, _OUTDATED)


def _discard(decision: Decision, discards: Discards) -> None:
    """Have everyone forget what is of a life that did not happen: not all may have been told.

    A node that missed two of the orders needs both. Between them the job has used numbers above the first one's again.
    """
    decision.effects += [do.DiscardAbove(epoch, version) for epoch, version in discards if epoch > NO_EPOCH]


def _adopt(decision: Decision, claim: RankClaim, phase: MemberPhase) -> Member:
    """Take a worker for its rank's owner, as the last coordinator did. How far it came, it will say itself."""
    seat = decision.state.seats[claim.found.rank]
    local_rank = placement.free_local_rank(decision.state, seat, claim.node)
    worker = _member_of(decision, claim, phase).worker
    decision.set_seat(seat.rank, owner=worker, node=claim.node, local_rank=local_rank, done=False)
    replacement = phase is MemberPhase.REHEARSING
    return decision.set_member(worker, rank=seat.rank, phase=phase, since=decision.now, replacement=replacement)


def _was_finishing(decision: Decision, truth: Truth) -> Truth:
    """Take note that ranks had been released, so that every rank was through, and its last version safe."""
    if decision.state.phase is JobPhase.REPAIRING:
        decision.enter(JobPhase.RUNNING, "every rank was attached")
    decision.enter(JobPhase.FINISHING, "every rank was done")
    decision.state.repair = decision.state.relocation = None
    fallen = list(truth.fallen)
    for claim in truth.unrecorded:
        if claim.found.released or claim.found.finished:
            _adopt(decision, claim, MemberPhase.RELEASED)
        else:
            end_orphan(decision, claim)
    for member in list(decision.state.owners()):
        found = truth.found[member.worker]
        if member.phase is MemberPhase.ENDING:
            continue
        if found.released or found.finished:
            decision.set_member(member.worker, phase=MemberPhase.RELEASED, replacement=False, since=decision.now)
        else:
            fallen.append(LostRank(copy(member), "was not through", None))
            end_orphan(decision, RankClaim(member.node, found))
    return Truth(fallen, (), truth.found)


def _finish(decision: Decision, truth: Truth, discards: Discards, why: str) -> None:
    """Go on ending; or have every rank come back at its last version, if one was lost."""
    _end_orphans(decision, truth.unrecorded)
    fallen = [one for one in truth.fallen if one.member.rank is not None]
    if decision.state.vacant():
        repair.lost_after_release(decision, fallen, f"{why}, and ranks were lost with the last")
        if decision.state.phase is JobPhase.REPAIRING:
            _discard(decision, discards)
            for seat in decision.state.vacant():
                if not seat.asked:
                    holders.ask(decision, seat.rank)
        return
    for member in decision.state.members.values():
        if member.phase is MemberPhase.RELEASED and not truth.found[member.worker].released:
            decision.effects.append(do.ReleaseWorker(member.worker))
        elif member.phase is MemberPhase.DISMISSED:
            decision.effects.append(do.DismissWorker(member.worker))


def _begin_again(decision: Decision, truth: Truth, why: str) -> None:
    """Begin the world again: set-up cannot be replayed, and the store was on the last coordinator's node."""
    begun = any(found.rank >= 0 for found in truth.found.values())
    _end_orphans(decision, truth.unrecorded)
    allowed = restart.restarts_allowed(decision.settings, decision.state)
    if decision.state.phase is JobPhase.SETTING_UP and not allowed:
        shutdown.stop(decision, 1, f"{why} before the world was protected, and no restart is allowed")
    elif decision.state.phase is JobPhase.SETTING_UP or (decision.state.phase is JobPhase.STARTING and begun):
        if decision.state.phase is JobPhase.STARTING:
            decision.enter(JobPhase.SETTING_UP, "ranks had been given")
        restart.end(decision, "starting the world again", why)
    elif decision.state.phase is JobPhase.STARTING:
        decision.effects.append(do.BeginGeneration(decision.state.generation))


def _end_orphans(decision: Decision, unrecorded: Sequence[RankClaim]) -> None:
    for claim in unrecorded:
        end_orphan(decision, claim)


def _end_again(decision: Decision) -> None:
    """Repeat orders to die: they may not have arrived."""
    for member in decision.state.in_phase(MemberPhase.ENDING):
        if member.since == decision.now:
            continue  # it was ordered just now
        if member.ending_grace_s:
            decision.terminate(member.worker, SIGTERM, member.ending_why)
        else:
            decision.set_member(member.worker, since=decision.now)
            decision.effects.append(do.KillWorker(member.worker, KillHow.SIGKILL, member.ending_why))
