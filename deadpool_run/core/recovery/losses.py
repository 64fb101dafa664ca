"""The consequences of the loss of a worker or of a node, in each phase of the job."""

from collections.abc import Mapping, Sequence
from typing import assert_never

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core import placement, places
from deadpool_run.core.copies import buddies, holders
from deadpool_run.core.decision import Decision
from deadpool_run.core.injection import Slowness, is_possible
from deadpool_run.core.members import Member
from deadpool_run.core.recovery import relocation, repair, restart, retries, shutdown, spare_pool
from deadpool_run.core.transitions import ATTACHED, JobPhase, MemberPhase
from deadpool_run.ids import NodeId
from deadpool_run.text import shortened

_NAMED = 5
"""The most nodes that a reason names, of many that are lost together."""


def worker_ended(decision: Decision, event: ev.WorkerExited | ev.WorkerStartFailed) -> None:
    """Forget the worker, and do what its end means in the job's phase."""
    member = decision.concerned(event)
    if member is None:
        return
    if isinstance(event, ev.WorkerStartFailed) and member.rank is not None:
        return  # it was given a rank, so it did start: its exit follows
    decision.remove(member)
    if isinstance(event, ev.WorkerStartFailed):
        spare_pool.parked_died(decision, member, f"it could not be started: {event.reason}")
    elif member.rank is None:
        spare_pool.parked_died(decision, member, shutdown.describe_exit(event.code, event.signal))
    elif event.code == 0 and member.phase not in (MemberPhase.ENDING, MemberPhase.RAISED):
        _left(decision, member, event)
    else:
        _lost(decision, member, event)


def _left(decision: Decision, member: Member, event: ev.WorkerExited) -> None:
    """Note a rank whose script ran to its end."""
    holders.left_behind(decision, member.held_rank, member.node, holders.held_after_death(event))
    decision.set_seat(member.held_rank, done=True)
    if decision.state.phase is JobPhase.REPAIRING and member.phase not in ATTACHED:
        why = f"rank {member.rank} left the script while the world was repaired, so the job cannot continue"
        shutdown.stop(decision, 1, why)


def _lost(decision: Decision, member: Member, event: ev.WorkerExited) -> None:
    fallen = repair.LostRank(member, _cause(decision, member, event), holders.held_after_death(event))
    if relocation.is_planned(decision.state, member):
        relocation.left(decision, fallen)
        return
    if decision.state.phase is JobPhase.FINISHING and _by_its_own_will(member, event):
        shutdown.stop(decision, 1, f"{fallen.why} after its last step")
    else:
        _ranks_lost(decision, [fallen], fallen.why)


def nodes_lost(decision: Decision, losses: Sequence[ev.NodeLost]) -> None:
    """Take every worker of the nodes for dead."""
    reasons = {loss.node: loss.reason for loss in losses if loss.node in decision.state.nodes}
    if not reasons:
        return
    names = {node: decision.state.nodes[node].place.name for node in reasons}
    fallen = []
    for node, members in remove_nodes(decision, reasons).items():
        cause = f"was lost with node {names[node]}"
        fallen += [repair.LostRank(member, cause, None) for member in members if member.rank is not None]
    why = _describe_loss(list(names.values()), list(reasons.values()))
    if fallen:
        _ranks_lost(decision, fallen, why)
    was_needed = holders.forget_nodes(decision, reasons.keys())
    if not fallen and was_needed and decision.state.phase is JobPhase.REPAIRING:
        repair.begin_epoch(decision, why)  # the version may have been chosen for what they held


def remove_nodes(decision: Decision, lost: Mapping[NodeId, str]) -> dict[NodeId, list[Member]]:
    """Forget nodes that were lost, for these reasons, with their workers, and return these.

    What the nodes held for other ranks is not forgotten here.
    """
    if not lost:
        return {}
    state = decision.state
    names = {node: state.nodes[node].place.name for node in lost}
    if state.exposed_at is None and buddies.had_copies(state, lost):
        state.exposed_at = decision.now
    released = state.released
    fallen = {node: state.on_node(node) for node in lost}
    decision.remove_nodes(lost)
    for node, members in fallen.items():
        for member in members:
            decision.remove(member)
        if node in released:
            decision.announce(f"node {names[node]} has left the job", "it was drained")
        else:
            decision.announce(f"node {names[node]} is lost: {lost[node]}", f"{len(members)} workers were on it")
    return fallen


def _describe_loss(names: Sequence[str], reasons: Sequence[str]) -> str:
    what = f"node {names[0]} is" if len(names) == 1 else f"nodes {shortened(names, _NAMED)} are"
    return f"{what} lost: {'; '.join(dict.fromkeys(reasons))}"


def fetch_failed(decision: Decision, event: ev.FetchFailed) -> None:
    """Try another holder of the rank's state; if there is none, the same one later, because the network may work again."""
    member = decision.state.members.get(event.worker)
    if member is not None and member.phase is MemberPhase.PREPARING:
        spare_pool.unfetched(decision, member, event)
    if member is None or member.rank is None or decision.state.repair is None:
        return
    why = f"the state of rank {member.rank} could not be fetched from {event.source}: {event.message}"
    if member.phase is MemberPhase.REHEARSING:  # it has no transcript, whatever the epoch is now
        decision.kill(member.worker, why)
        decision.set_member(member.worker, blameless=True)
    elif event.epoch != decision.state.epoch:
        return
    under_way = decision.repair
    began_at = decision.now if under_way.fetch_failed_at is None else under_way.fetch_failed_at
    patience_until = began_at + decision.settings.repair_timeout_s
    if holders.is_only_source(decision.state, member, event.source) and decision.now < patience_until:
        under_way.fetch_failed_at = began_at
        retries.fetch_later(decision, member.rank)
    else:
        under_way.fetch_failed_at = None
        under_way.failed_sources |= {(member.rank, event.source)}
        holders.forget(decision, member.rank, event.source)
    repair.begin_epoch(decision, why)


def device_failed(decision: Decision, event: ev.DeviceFailed) -> None:
    """Avoid the GPU from now on. Its rank stays until it fails: an error of the driver is not always the end of a process."""
    node = decision.state.nodes.get(event.node)
    if node is not None and places.note_device_failed(decision.state, event.node, event.local_rank):
        where = f"GPU {event.local_rank} of node {node.place.name}"
        decision.announce(f"{where} failed, and is avoided", event.reason)


def _note_failures(decision: Decision, fallen: list[repair.LostRank]) -> None:
    """Count the losses against their places, unless others are to blame, or the node is gone."""
    state = decision.state
    for member in (one.member for one in fallen if one.left is not None):
        if member.is_injected or member.blameless:
            continue
        node, local_rank = member.node, state.seats[member.held_rank].local_rank
        was_bad = places.is_bad(state, node, local_rank)
        places.note_failure(state, node, local_rank)
        has_others = len(state.nodes) > 1 or placement.good_devices(state, node)
        if has_others and not was_bad and places.is_bad(state, node, local_rank):
            decision.announce(
                f"place {local_rank} of node {state.nodes[node].place.name} is avoided",
                f"{places.BAD_AFTER} workers failed there, and no step was completed between them",
            )


def _ranks_lost(decision: Decision, fallen: list[repair.LostRank], why: str) -> None:
    relocation.give_up(decision, why)
    if decision.state.phase in (JobPhase.SETTING_UP, JobPhase.RUNNING, JobPhase.REPAIRING):
        _note_failures(decision, fallen)
    match decision.state.phase:
        case JobPhase.SETTING_UP:
            restart.restart(decision, why)
        case JobPhase.RUNNING | JobPhase.REPAIRING:
            repair.lost(decision, fallen, why)
        case JobPhase.FINISHING:
            repair.lost_after_release(decision, fallen, f"{why} after its last step")
        case JobPhase.NEW | JobPhase.STARTING | JobPhase.RESTARTING | JobPhase.STOPPING | JobPhase.STOPPED:
            pass  # no worker holds a rank, or every end is expected
        case unknown:
            assert_never(unknown)


def _by_its_own_will(member: Member, event: ev.WorkerExited) -> bool:
    """Tell whether the script chose its exit code, as `sys.exit` does, which is no fault."""
    return event.code is not None and member.phase is MemberPhase.RELEASED and member.injected_at is None


def _cause(decision: Decision, member: Member, event: ev.WorkerExited) -> str:
    """Return why the worker ended: we ended it, it raised, or else how its process ended."""
    if member.phase is MemberPhase.ENDING:
        return f"was ended: {member.ending_why}"
    for one in reversed(decision.state.raises):
        if one.worker == member.worker:
            where = "" if one.step is None else f" in step {one.step}"
            return f"raised {one.kind}{where}: {one.message}"
    return shutdown.describe_exit(event.code, event.signal)


def kill_requested(decision: Decision, event: ev.KillRequested) -> None:
    """Inject a fault into a rank's worker or a spare, or tell the user why not."""
    if event.spare is not None:
        spare = decision.state.members.get(event.spare)
        if spare is None or spare.rank is not None or spare.phase is MemberPhase.ENDING:
            decision.announce(f"fault for spare worker {event.spare} not injected", "there is no such spare now")
        else:
            decision.order(do.KillWorker(event.spare, event.how, "fault injected into a spare", injected=True))
        return
    what = f"fault for rank {event.rank} not injected"
    if not 0 <= event.rank < decision.settings.world_size:
        decision.announce(what, f"there is no such rank: the world has {decision.settings.world_size}")
        return
    owner = decision.state.owner(event.rank)
    if owner is None:
        decision.announce(what, "no worker holds the rank now")
    elif owner.phase is MemberPhase.ENDING:
        decision.announce(what, "its worker is being ended already")
    else:
        decision.set_member(owner.worker, injected_at=decision.now, slowed_until=decision.now)
        decision.order(do.KillWorker(owner.worker, event.how, f"fault injected into rank {event.rank}", injected=True))


def slow_requested(decision: Decision, event: ev.SlowRequested) -> None:
    """Slow a rank's worker for a time, or tell the user why not."""
    slowness = Slowness(event.factor, event.for_s)
    owner = decision.state.owner(event.rank) if 0 <= event.rank < decision.settings.world_size else None
    if not is_possible(slowness):
        decision.announce(f"rank {event.rank} is not slowed", f"{slowness} is not possible")
    elif owner is None or owner.phase is MemberPhase.ENDING:
        decision.announce(f"rank {event.rank} is not slowed", "no worker holds the rank now")
    else:
        decision.set_member(owner.worker, slowed=slowness, slowed_until=decision.now + event.for_s)
        decision.announce(
            f"rank {event.rank} (worker {owner.worker}) {slowness.description()}",
            "a user injected this fault",
        )
        decision.effects.append(do.SlowWorker(owner.worker, event.factor, event.for_s))


def agent_kill_requested(decision: Decision, event: ev.AgentKillRequested) -> None:
    """Inject the loss of a node, which its agent's end causes, or tell the user why not."""
    if event.node not in decision.state.nodes:
        decision.announce(f"fault for node {event.node} not injected", "there is no such node now")
        return
    for member in decision.state.on_node(event.node):
        decision.set_member(member.worker, injected_at=decision.now)
    decision.effects.append(do.KillAgent(event.node))
