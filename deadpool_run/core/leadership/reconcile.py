"""What is believed of the workers against what is there, after the coordinator moved.

One owner for each rank: of all that were given it, dead ones included, the one of the largest epoch. Any other is ended,
and its rank is not given away before its end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import SIGTERM

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.copies import holders
from deadpool_run.core.events import WorkerFound
from deadpool_run.core.injection import KillHow
from deadpool_run.core.recovery import repair, restart, shutdown, spare_pool
from deadpool_run.core.recovery.repair import Fallen
from deadpool_run.core.state import NO_EPOCH, Member, Repair
from deadpool_run.core.transitions import PARKED, JobPhase, MemberPhase
from deadpool_run.core.turn import Turn
from deadpool_run.ids import Epoch, NodeId, Rank, Version, WorkerId

_REPAIRED_IN = frozenset({JobPhase.RUNNING, JobPhase.REPAIRING})
_OUTDATED = "it was given its rank by another coordinator, and is not needed"
_BESIDE_THE_LAST = "it was setting up beside the last coordinator's store, which is gone"


@dataclass(frozen=True, slots=True)
class Claim:
    """A worker that was given a rank, wherever and by whichever coordinator."""

    node: NodeId
    found: WorkerFound


@dataclass(frozen=True, slots=True)
class Truth:
    """What is there.

    `fallen` are the ranks' workers that are gone, `heirs` the living workers that were given a rank without its being
    known, and `found` every worker that is there, or was.
    """

    fallen: Sequence[Fallen]
    heirs: Sequence[Claim]
    found: Mapping[WorkerId, WorkerFound]


def compare(turn: Turn, found: Mapping[NodeId, Sequence[WorkerFound]], lost: Sequence[Member]) -> Truth:
    """Bring the members in line with what is there. `lost` are those of nodes that are no more."""
    everyone = {each.worker: Claim(node, each) for node, workers in found.items() for each in workers}
    if any(claim.found.initialized for claim in everyone.values()):
        turn.set(managed=True)
    fallen = [Fallen(member, f"was lost with node {member.node}", None) for member in lost if member.rank is not None]
    for member in list(turn.state.members.values()):
        claim = everyone.get(member.worker)
        if claim is None or not claim.found.alive:
            fallen += _gone(turn, member, None if claim is None else claim.found)
        else:
            _is_there(turn, member, claim.found)
    claims: dict[int, list[Claim]] = {}
    for claim in everyone.values():
        claims.setdefault(claim.found.rank, []).append(claim)
    heirs = []
    for rank in range(turn.settings.world_size):
        heir = _settle_rank(turn, Rank(rank), claims.get(rank, []), fallen)
        heirs += [heir] if heir is not None else []
    for claim in everyone.values():
        if claim.found.alive and claim.found.rank < 0 and claim.found.worker not in turn.state.members:
            end_stray(turn, claim.node, claim.found)
    return Truth(fallen, heirs, {worker: claim.found for worker, claim in everyone.items()})


def end_stray(turn: Turn, node: NodeId, found: WorkerFound, why: str = _OUTDATED) -> None:
    """End a worker that holds nothing by right; the rank that it was given waits for its end."""
    rank = Rank(found.rank) if found.rank >= 0 else None
    member = turn.state.members.get(found.worker)
    if member is None:
        member = Member(found.worker, node, MemberPhase.STARTING, turn.now, pid=found.pid)
        turn.add_member(member)
    elif member.rank is not None:
        turn.set_seat(member.rank, owner=None)
    turn.set_member(found.worker, rank=None, newcomer=False, claimed=rank)
    turn.kill(found.worker, why)


def go_on(turn: Turn, truth: Truth, discarded: tuple[Epoch, Version], why: str) -> None:
    """Have the job go on from what is there."""
    if turn.state.phase in _REPAIRED_IN and any(found.released for found in truth.found.values()):
        truth = _was_finishing(turn, truth)
    match turn.state.phase:
        case JobPhase.RUNNING | JobPhase.REPAIRING:
            _repair(turn, truth, discarded, why)
        case JobPhase.FINISHING:
            _finish(turn, truth, discarded, why)
        case JobPhase.STARTING | JobPhase.UNPROTECTED | JobPhase.RESTARTING:
            _begin_again(turn, truth, why)
        case JobPhase.NEW | JobPhase.STOPPING | JobPhase.STOPPED:
            _end_strays(turn, truth.heirs)
    _end_again(turn)


def _gone(turn: Turn, member: Member, found: WorkerFound | None) -> list[Fallen]:
    """Forget a worker that ended, or whose start was never heard of."""
    turn.remove(member)
    if member.rank is None:
        return []
    chose_to = member.phase not in (MemberPhase.ENDING, MemberPhase.RAISED)
    if found is not None and found.code == 0 and chose_to:
        turn.set_seat(member.rank, done=True)
        return []
    how = "ended" if found is None else shutdown.describe_exit(ev.WorkerExited(found.worker, found.code, found.signal))
    return [Fallen(member, f"{how} while the coordinator moved", None)]


def _is_there(turn: Turn, member: Member, found: WorkerFound) -> None:
    if member.pid != found.pid:
        turn.set_member(member.worker, pid=found.pid)
    if member.phase is MemberPhase.ENDING:
        return
    if member.rank is not None and found.rank < 0:  # the order that gave it its rank never arrived
        turn.set_seat(member.rank, owner=None)
        turn.set_member(member.worker, rank=None, newcomer=False, phase=MemberPhase.READY, since=turn.now)
    elif member.phase in PARKED and found.dismissed:
        turn.set_member(member.worker, phase=MemberPhase.DISMISSED, since=turn.now)
    elif member.phase is MemberPhase.PREPARING:
        # It may never have been told to; whoever has rehearsed says nothing again.
        turn.set_member(member.worker, phase=MemberPhase.READY, prepared=None, since=turn.now)
    elif member.phase is MemberPhase.STARTING and found.ready:
        turn.set_member(member.worker, phase=MemberPhase.READY, since=turn.now, ready_at=turn.now)


def _settle_rank(turn: Turn, rank: Rank, claims: Sequence[Claim], fallen: list[Fallen]) -> Claim | None:
    """End all that were given the rank but the last; return that one if it lives and was not known for its owner."""
    mine = sorted(claims, key=lambda claim: claim.found.epoch)
    if not mine:
        return None
    owner, last = turn.state.owner(rank), mine[-1]
    for claim in mine[:-1]:
        if claim.found.alive:
            if owner is not None and claim.found.worker == owner.worker:
                fallen.append(Fallen(owner, "was replaced before the coordinator moved", None))
            end_stray(turn, claim.node, claim.found)
    if not last.found.alive:
        if last.found.code == 0 and turn.state.seats[rank].owner is None and last.found.released:
            turn.set_seat(rank, done=True)
        return None
    known = turn.state.members.get(last.found.worker)
    if known is not None and (known.rank == rank or known.phase is MemberPhase.ENDING):
        if known.rank != rank:
            end_stray(turn, last.node, last.found)
        return None
    return last


def _repair(turn: Turn, truth: Truth, discarded: tuple[Epoch, Version], why: str) -> None:
    """Recall everybody to one epoch, and ask anew who holds what of the ranks whose owners are gone."""
    before = turn.state.repair or Repair(began_at=turn.now)
    turn.set(repair=before)
    for one in truth.fallen:
        repair.note_loss(turn, one)  # which is no attempt: it is the coordinator's node that failed, not the repair
    for heir in truth.heirs:
        _adopt(turn, heir, MemberPhase.REHEARSING, newcomer=True)
        repair.replaced(turn, Rank(heir.found.rank), turn.state.members[heir.found.worker])
    _end_unrehearsed(turn, truth)
    _end_surplus(turn)
    repair.begin_epoch(turn, why)
    if turn.state.phase is not JobPhase.REPAIRING:
        return
    _discard(turn, discarded)
    for seat in turn.state.seats:
        if seat.owner is None or turn.state.members[seat.owner].newcomer:
            holders.ask(turn, seat.rank)
    for member in turn.state.owners():
        turn.effects.append(do.SetCaptureInterval(member.worker, turn.state.capture_interval))


def _end_unrehearsed(turn: Turn, truth: Truth) -> None:
    """End newcomers that set up beside a store that is gone: they would wait for it. Others take their ranks at once."""
    for member in list(turn.state.owners()):
        if member.phase is MemberPhase.ENDING:
            continue
        found = truth.found[member.worker]
        sets_up = member.newcomer and member.phase in (MemberPhase.REHEARSING, MemberPhase.RE_ENTERING)
        if not found.rehearsed and (found.reentering or sets_up):
            end_stray(turn, member.node, found, _BESIDE_THE_LAST)
        elif found.reentering:  # it waits for its state, whatever was known of that
            turn.set_member(member.worker, phase=MemberPhase.REHEARSING, newcomer=True, since=turn.now)
        elif member.phase is MemberPhase.UNWINDING:  # the order to do so never arrived
            turn.set_member(member.worker, phase=MemberPhase.DRAINING, reentered=False, since=turn.now)


def _end_surplus(turn: Turn) -> None:
    """End parked workers for which a node has no room: the last coordinator had ended them, and started others."""
    for node, room in list(spare_pool.rooms(turn.settings, turn.state, turn.state.nodes.keys())):
        on_node = [member for member in turn.state.on_node(node) if member.phase is not MemberPhase.ENDING]
        surplus = len(on_node) - room
        parked = [member for member in on_node if member.phase in PARKED]
        for member in parked[: max(0, surplus)]:
            turn.kill(member.worker, _OUTDATED)


def _discard(turn: Turn, discarded: tuple[Epoch, Version]) -> None:
    """Have everyone forget what is of a life that did not happen: not all may have been told."""
    if discarded[0] > NO_EPOCH:
        turn.effects.append(do.DiscardAbove(*discarded))


def _adopt(turn: Turn, heir: Claim, phase: MemberPhase, *, newcomer: bool) -> None:
    """Take a worker for its rank's owner, as the last coordinator did. How far it came, it will say itself."""
    found, rank = heir.found, Rank(heir.found.rank)
    member = turn.state.members.get(found.worker)
    here = turn.state.seat_tally.homes.get(heir.node, frozenset())
    taken = {turn.state.seats[other].local_rank for other in here if other != rank}
    mine = turn.state.seats[rank].local_rank
    local_rank = mine if mine not in taken else min(set(range(len(taken) + 1)) - taken)
    if member is None:
        member = Member(found.worker, heir.node, phase, turn.now, pid=found.pid)
        turn.add_member(member)
    turn.set_seat(rank, owner=found.worker, node=heir.node, local_rank=local_rank, done=False)
    turn.set_member(found.worker, rank=rank, phase=phase, since=turn.now, newcomer=newcomer)


def _was_finishing(turn: Turn, truth: Truth) -> Truth:
    """Take note that ranks had been released, so that every rank was through, and its last version safe."""
    if turn.state.phase is JobPhase.REPAIRING:
        turn.enter(JobPhase.RUNNING, "every rank was attached")
    turn.enter(JobPhase.FINISHING, "every rank was done")
    turn.set(repair=None)
    fallen = list(truth.fallen)
    for heir in truth.heirs:
        if heir.found.released or heir.found.finished:
            _adopt(turn, heir, MemberPhase.RELEASED, newcomer=False)
        else:
            end_stray(turn, heir.node, heir.found)
    for member in list(turn.state.owners()):
        found = truth.found[member.worker]
        if member.phase is MemberPhase.ENDING:
            continue
        if found.released or found.finished:
            turn.set_member(member.worker, phase=MemberPhase.RELEASED, newcomer=False, since=turn.now)
        else:
            fallen.append(Fallen(member, "was not through", None))
            end_stray(turn, member.node, found)
    return Truth(fallen, (), truth.found)


def _finish(turn: Turn, truth: Truth, discarded: tuple[Epoch, Version], why: str) -> None:
    """Go on ending; or have every rank come back at its last version, if one was lost."""
    _end_strays(turn, truth.heirs)
    fallen = [one for one in truth.fallen if one.member.rank is not None]
    if turn.state.vacant():
        repair.lost_after_release(turn, fallen, f"{why}, and ranks were lost with the last")
        if turn.state.phase is JobPhase.REPAIRING:
            _discard(turn, discarded)
            for seat in turn.state.vacant():
                if not seat.asked:
                    holders.ask(turn, seat.rank)
        return
    for member in turn.state.members.values():
        if member.phase is MemberPhase.RELEASED and not truth.found[member.worker].released:
            turn.effects.append(do.ReleaseWorker(member.worker))
        elif member.phase is MemberPhase.DISMISSED:
            turn.effects.append(do.DismissWorker(member.worker))


def _begin_again(turn: Turn, truth: Truth, why: str) -> None:
    """Begin the world again: set-up cannot be replayed, and the store was beside the last coordinator."""
    begun = any(found.rank >= 0 for found in truth.found.values())
    _end_strays(turn, truth.heirs)
    if turn.state.phase is JobPhase.UNPROTECTED:
        if not restart.restarts_allowed(turn.settings, turn.state):
            shutdown.stop(turn, 1, f"{why} before the world was protected, and no restart is allowed")
            return
        restart.end(turn, "starting the world again", why)
    elif turn.state.phase is JobPhase.STARTING and begun:
        turn.enter(JobPhase.UNPROTECTED, "ranks had been given")
        restart.end(turn, "starting the world again", why)
    elif turn.state.phase is JobPhase.STARTING:
        turn.effects.append(do.BeginGeneration(turn.state.generation))


def _end_strays(turn: Turn, heirs: Sequence[Claim]) -> None:
    for heir in heirs:
        end_stray(turn, heir.node, heir.found)


def _end_again(turn: Turn) -> None:
    """Give the orders to die again that may not have arrived."""
    for member in turn.state.in_phase(MemberPhase.ENDING):
        if member.since == turn.now:
            continue  # it was ordered just now
        if member.ending_grace_s:
            turn.terminate(member.worker, SIGTERM, member.ending_why)
        else:
            turn.set_member(member.worker, since=turn.now)
            turn.effects.append(do.KillWorker(member.worker, KillHow.SIGKILL, member.ending_why))
