"""Invariants of the coordinator's state, which tests check after every step."""

from collections.abc import Iterator

from deadpool_run.core.counters import MemberCounters, SeatCounters
from deadpool_run.core.recovery import spare_pool
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.core.transitions import AT_WORK_IN_REPAIR, ATTACHED, HOLDS_RANK, PARKED, JobPhase, MemberPhase

_OVER = frozenset({JobPhase.STOPPING, JobPhase.STOPPED})

_BEFORE_ATTACHING = AT_WORK_IN_REPAIR - {MemberPhase.ATTACHING} | {MemberPhase.ABORTED, MemberPhase.REHEARSED}


def check_invariants(settings: Settings, state: State) -> None:
    """Raise AssertionError naming every invariant that the state breaks."""
    broken = list(_broken(settings, state))
    assert not broken, "; ".join(broken)


def _broken(settings: Settings, state: State) -> Iterator[str]:
    yield from _broken_seats(settings, state)
    yield from _broken_members(state)
    yield from _broken_phase(settings, state)
    yield from _broken_repair(state)
    yield from _broken_nodes(settings, state)
    yield from _broken_relocation(state)
    yield from _broken_groups(state)
    yield from _broken_counters(state)


def _broken_counters(state: State) -> Iterator[str]:
    if (kept := _of_members(state.member_counters)) != (counted := _of_members(MemberCounters(state.members))):
        yield f"the counters of members are wrong: {kept}, not {counted}"
    if (seats := _of_seats(state.seat_counters)) != (anew := _of_seats(SeatCounters(state.seats))):
        yield f"the counters of seats are {seats}, and should be {anew}"


def _of_members(kept: MemberCounters) -> tuple[object, ...]:
    longest = {phase: kept.longest_waiting(phase) for phase in kept.by_phase}
    since = {phase: member.patience_from for phase, member in longest.items() if member is not None}
    return kept.by_phase, kept.by_node, kept.alive, kept.stepped, kept.bound, kept.claiming, since


def _of_seats(kept: SeatCounters) -> tuple[object, ...]:
    return kept.vacant, kept.searched, kept.by_node, kept.done, kept.unrehearsable, kept.unknown


def _broken_nodes(settings: Settings, state: State) -> Iterator[str]:
    leaving = (MemberPhase.ENDING, MemberPhase.DISMISSED)
    for node in state.nodes:
        alive = sum(member.phase not in leaving for member in state.on_node(node))
        if alive > (room := spare_pool.capacity(settings, state, node)):
            yield f"{alive} workers are alive on {node}, which has room for {room}"
    for member in state.members.values():
        if member.node not in state.nodes:
            yield f"worker {member.worker} lives on {member.node}, which is lost"
    homes = [(seat.node, seat.local_rank) for seat in state.seats if seat.owner is not None]
    if len(set(homes)) < len(homes):
        yield f"two ranks have the same place on a node: {homes}"
    spares = [  # one that leaves gives back its GPU, as it gives back its room
        (each.node, each.place)
        for each in state.members.values()
        if each.rank is None and each.place is not None and each.phase not in leaving
    ]
    if len({*homes, *spares}) < len(homes) + len(spares):
        yield f"a spare rehearses on the GPU of another worker: ranks {homes}, spares {spares}"
    if state.term and state.epoch <= state.term << 20 and state.phase is not JobPhase.STOPPED:
        yield f"epoch {state.epoch} may have been used before term {state.term}"
    for node, shortage in state.shortages.items():
        if node not in state.nodes or (shortage.refused and shortage.until is None):
            yield f"{node} is lost, or it refuses copies without being avoided: {shortage}"
    for rank, buddies in enumerate(state.buddies):
        if len(set(buddies)) < len(buddies) or (state.phase is JobPhase.RUNNING and state.seats[rank].node in buddies):
            yield f"the copies of rank {rank} are not on other nodes: {buddies}"


def _broken_groups(state: State) -> Iterator[str]:
    for group in state.parity_groups if state.phase is JobPhase.RUNNING else ():
        nodes = [state.seats[rank].node for rank in group] + list(state.buddies[group[0]])
        if len(set(nodes)) < len(group) + 1 or len({state.buddies[rank] for rank in group}) > 1:
            yield f"the loss of one node takes two of ranks {group} and their parity: {nodes}"


def _broken_relocation(state: State) -> Iterator[str]:
    relocation = state.relocation
    if relocation is not None and state.phase not in (JobPhase.RUNNING, JobPhase.REPAIRING):
        yield f"a drain is under way while {state.phase}"
    if relocation is not None and relocation.node is not None and relocation.node not in state.closed:
        yield f"{relocation.node} is being drained, and may get ranks"
    if not state.released <= state.closed <= state.nodes.keys():
        yield f"of the nodes {list(state.nodes)}, {set(state.closed)} are closed and {set(state.released)} released"
    for node in state.closed:
        if any(member.phase in PARKED for member in state.on_node(node)):
            yield f"a spare is kept on {node}, which is drained"
    for node in state.released:
        held = {buddy for buddies in state.buddies for buddy in buddies}
        if state.phase is JobPhase.RUNNING and (node in held or any(state.owner(r) for r in state.ranks_on(node))):
            yield f"{node} may leave, but has a rank or a copy"
    for member in state.members.values():
        if member.planned and member.phase is not MemberPhase.ENDING:
            yield f"worker {member.worker} was ended for a drain, but is {member.phase}"


def _broken_seats(settings: Settings, state: State) -> Iterator[str]:
    if [seat.rank for seat in state.seats] != list(range(settings.world_size)):
        yield "the seats are not those of ranks 0..W-1"
    owners = [seat.owner for seat in state.seats if seat.owner is not None]
    if len(set(owners)) != len(owners):
        yield "a worker holds two ranks"
    for seat in state.seats:
        if seat.done and seat.owner is not None:
            yield f"rank {seat.rank} is done and held"
        if seat.owner is not None and (seat.owner not in state.members or state.members[seat.owner].rank != seat.rank):
            yield f"rank {seat.rank} and its owner {seat.owner} disagree"


def _broken_members(state: State) -> Iterator[str]:
    for worker, member in state.members.items():
        if worker != member.worker or worker >= state.next_worker:
            yield f"worker {worker} has the wrong key, or its number may be used again"
        if member.rank is not None and state.seats[member.rank].owner != worker:
            yield f"worker {worker} has rank {member.rank}, which another worker owns"
        if member.rank is not None and member.phase not in HOLDS_RANK:
            yield f"worker {worker} holds a rank while {member.phase}"
        if member.rank is None and member.phase in HOLDS_RANK - {MemberPhase.ENDING}:
            yield f"worker {worker} holds no rank while {member.phase}"
        if member.claimed is not None and (member.rank is not None or member.phase is not MemberPhase.ENDING):
            yield f"worker {worker} got rank {member.claimed} from another coordinator, but is not ended"
        if member.phase is MemberPhase.ENDED:
            yield f"worker {worker} has ended, but is still recorded"
        if member.replacement and member.phase in ATTACHED:
            yield f"worker {worker} is attached, but still a replacement"


def _broken_phase(settings: Settings, state: State) -> Iterator[str]:
    held = len(list(state.owners()))
    if state.phase in (JobPhase.NEW, JobPhase.STARTING) and held:
        yield f"a rank is held while {state.phase}"
    if state.phase is JobPhase.RUNNING:
        at_work = ATTACHED | {MemberPhase.RAISED, MemberPhase.ENDING}
        if state.vacant() or any(member.phase not in at_work for member in state.owners()):
            yield "running, but not every rank is held by an attached member"
        if not all(seat.rehearsable for seat in state.seats):
            yield "running, but a rank cannot be rehearsed"
    if state.phase is JobPhase.REPAIRING and state.repair is None:
        yield "repairing without a repair"
    left = held + len(state.vacant()) < settings.world_size
    if (
        state.phase is JobPhase.REPAIRING
        and left
        and any(member.phase in _BEFORE_ATTACHING for member in state.owners())
    ):
        yield "repairing a world that a rank has left"
    if (state.phase in _OVER) != (state.stop is not None and bool(state.stop.reason)):
        yield "stopping without a reason, or not stopping despite a reason"
    if state.phase is JobPhase.STOPPED and state.members:
        yield "stopped, but a worker is left"
    if state.epoch == 0 and state.phase not in (JobPhase.NEW, *_OVER):
        yield f"epoch 0 while {state.phase}"


def _broken_repair(state: State) -> Iterator[str]:
    repair = state.repair
    if repair is None:
        return
    if state.phase not in (JobPhase.RUNNING, JobPhase.REPAIRING):
        yield f"a repair is under way while {state.phase}"
    if repair.resume is not None:
        for seat in state.seats:
            if seat.held is not None and repair.resume not in seat.held:
                yield f"rank {seat.rank} shall resume from {repair.resume}, which it does not hold"
    if repair.resume is None and state.phase is JobPhase.REPAIRING:
        early = state.in_phase(MemberPhase.RESTORING, MemberPhase.RESTORED, MemberPhase.ATTACHING, *ATTACHED)
        if early:
            yield f"worker {early[0].worker} is {early[0].phase}, but no version was chosen in this epoch"
