"""The pool of spare workers: their number, their rehearsals, their deaths."""

from collections.abc import Collection, Iterator

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core import placement, places
from deadpool_run.core.counters import LEAVING
from deadpool_run.core.decision import Decision
from deadpool_run.core.members import Member
from deadpool_run.core.recovery import shutdown
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.ids import NodeId, Rank

_TO_COME = (MemberPhase.STARTING, MemberPhase.READY, MemberPhase.PREPARING)
"""Phases of workers that may get a rank."""
_AWAITED = (*_TO_COME, MemberPhase.ENDING)
"""Phases of workers that may get a rank, or whose end makes room for such a worker."""
_HEALED_IN = frozenset({JobPhase.STARTING, JobPhase.SETTING_UP, JobPhase.RUNNING, JobPhase.REPAIRING})


def heal(decision: Decision) -> None:
    """Start missing workers. A pool that crashes in a loop waits, or stops a job that needs it."""
    state = decision.state
    if state.phase not in _HEALED_IN:
        return
    nodes = _to_look_at(decision)
    if not nodes:
        return
    missing = _missing(decision.settings, state, nodes)
    crashing = sorted({node for node in missing if places.is_crashing(state, node, decision.now)})
    for node in missing:
        if node not in crashing:
            decision.start_worker(node)
    if crashing and _needs_worker(decision):
        shutdown.stop(decision, 1, _describe(state, crashing[0]))


def _to_look_at(decision: Decision) -> Collection[NodeId]:
    """Return the nodes where this decision may have changed the number of workers, or the room for them."""
    changes, state = decision.changes, decision.state
    if (
        decision.phase_before not in _HEALED_IN
        or decision.limited_before
        or places.are_limited(state)  # then some nodes got no new workers
        or changes.done
        or changes.nodes_lost  # then others may have moved up to the nodes with spares
    ):
        return state.nodes.keys()
    if not changes.alive:
        return changes.joined
    return sorted(changes.alive.union(changes.joined) & state.nodes.keys(), key=lambda node: state.nodes[node].arrival)


def prepare(decision: Decision) -> None:
    """Have one spare of each node at a time rehearse ahead of need: the others can be given a rank meanwhile.

    On a node with GPUs it rehearses on one that no rank uses, and spares for which there is none stay parked.
    """
    state = decision.state
    if not decision.settings.hot_spares or state.unpreparable or state.phase is not JobPhase.RUNNING:
        return
    if state.repair is not None or state.relocation is not None:
        return
    busy = {member.node for member in state.in_phase(MemberPhase.PREPARING)}
    for member in state.in_phase(MemberPhase.READY):
        if member.prepared is None and member.node not in busy:
            busy.add(member.node)
            _prepare(decision, member)


def rehearse(decision: Decision, member: Member, rank: Rank, local_rank: int) -> bool:
    """Have a spare rehearse as this rank, which lives on its node or another one. Return False if no GPU is free for it."""
    state = decision.state
    on_device = member.place  # where it has rehearsed before, it has the GPU already
    if state.nodes[member.node].place.devices and on_device is None:
        on_device = min(placement.good_devices(state, member.node), default=None)
        if on_device is None:
            return False  # on a rank's GPU it could take the memory that the training needs
    home = state.seats[rank].node
    source = None if home == member.node else home
    decision.set_member(member.worker, prepared=rank, place=on_device)
    place = local_rank if on_device is None else on_device
    decision.order(do.PrepareSpare(member.worker, rank, state.epoch, place, source))
    return True


def _prepare(decision: Decision, member: Member) -> None:
    """Have it rehearse as a rank of its node; in reserve, as one of another node. Each spare of a node is for another rank."""
    state = decision.state
    home = member.node if state.ranks_on(member.node) else _example(state, member.node)
    if home is None:
        return
    taken = [each.prepared for each in state.on_node(member.node)]
    lost = [loss.rank for incident in state.incidents for loss in incident.losses]
    # A rank that was lost before is likely to be lost again (a bad device).
    rank = min(state.ranks_on(home), key=lambda rank: (taken.count(rank), -lost.count(rank), rank))
    rehearse(decision, member, rank, state.seats[rank].local_rank)


def _example(state: State, reserve: NodeId) -> NodeId | None:
    """Return the node whose ranks a node in reserve rehearses: each reserve those of another one."""
    homes = [node for node in state.nodes if state.ranks_on(node)]
    reserves = [node for node in state.nodes if not state.ranks_on(node)]
    return homes[reserves.index(reserve) % len(homes)] if homes else None


def unfetched(decision: Decision, member: Member, event: ev.FetchFailed) -> None:
    """Park a spare that got no transcript. If nothing is being repaired, another try would end alike."""
    decision.set_member(member.worker, phase=MemberPhase.READY, prepared=None, place=None, since=decision.now)
    state = decision.state
    if event.epoch == state.epoch and state.repair is None and event.source in state.nodes:
        unprepared(decision, f"no transcript came from {event.source}: {event.message}")


def unprepared(decision: Decision, why: str) -> None:
    """Rehearse no spare ahead of need from now on."""
    decision.state.unpreparable = True
    decision.announce("spares no longer rehearse", why)


def parked_died(decision: Decision, member: Member, how: str) -> None:
    """Note the death of a worker that held no rank."""
    if member.phase in LEAVING or decision.state.phase not in _HEALED_IN:
        return
    places.note_crash(decision.state, member.node, decision.now)
    decision.announce(f"spare worker {member.worker} died", how)


def is_exhausted(settings: Settings, state: State) -> bool:
    """Tell whether a rank is vacant and no worker is there, or can be started, to take it."""
    if not state.seat_counters.vacant or state.count(*_AWAITED):
        return False
    return not _missing(settings, state, state.nodes.keys())


def heal_deadline(settings: Settings, state: State) -> float | None:
    """Return when a pool that crashed in a loop is healed again."""
    if state.phase not in _HEALED_IN:
        return None
    due = [at for node, at in places.calm_at(state) if node in state.nodes and _missing(settings, state, [node])]
    return min(due, default=None)


def capacity(settings: Settings, state: State, node: NodeId) -> int:
    """Return how many workers the node is to have: one for each of its ranks that is not done, and its spares."""
    return next(room for _, room in rooms(settings, state, [node]))


def rooms(settings: Settings, state: State, nodes: Collection[NodeId]) -> Iterator[tuple[NodeId, int]]:
    """Yield the nodes and how many workers each is to have. Spares are on the nodes that arrived first.

    A node that is drained gets none, and keeps what it has.
    """
    order = {node: at for at, node in enumerate(state.nodes)} if settings.spares and nodes else {}
    first, rest = divmod(settings.spares, settings.nodes)
    any_done = state.seat_counters.done > 0
    for node in nodes:
        if node in state.closed:
            yield node, state.member_counters.alive[node]
            continue
        at = order.get(node, settings.nodes)
        spares = first + (at < rest) if at < settings.nodes else 0
        done = sum(state.seats[rank].done for rank in state.ranks_on(node)) if any_done else 0
        yield node, settings.ranks_per_node + spares - done


def _missing(settings: Settings, state: State, nodes: Collection[NodeId]) -> list[NodeId]:
    """Return the node of each worker that is to be started."""
    alive = state.member_counters.alive
    return [node for node, room in rooms(settings, state, nodes) for _ in range(room - alive[node])]


def _needs_worker(decision: Decision) -> bool:
    """Tell whether a rank waits for a worker, and only nodes whose workers die have room for one."""
    settings, state = decision.settings, decision.state
    if state.phase is JobPhase.STARTING:
        good = sum(not places.is_crashing(state, node, decision.now) for node in state.nodes)
        to_come = max(0, settings.nodes + settings.spare_nodes - state.arrivals)
        return good + to_come < settings.nodes
    return state.phase is JobPhase.REPAIRING and len(state.vacant()) > state.count(*_TO_COME)


def _describe(state: State, node: NodeId) -> str:
    where = "" if len(state.nodes) == 1 else f" on node {state.nodes[node].place.name}"
    if state.never_ready.get(node, 0) >= places.NEVER_READY:
        return f"{places.NEVER_READY} workers in a row were not ready in time{where}; see their output for the cause"
    return f"{places.CRASHES} workers died before they were given a rank{where}; see their output for the cause"
