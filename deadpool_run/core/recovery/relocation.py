"""Drains: ranks leave a worker or a node at the end of a step, and no step is repeated.

1. Spares rehearse as the ranks that move, while these train.
2. The coordinator orders every rank to begin no further step. Each rank answers with the version at which it can stop. The
   latest of these versions is the limit.
3. When every rank has reached the limit, the coordinator begins a repair that resumes from it. The repair ends the workers
   whose ranks move.

A loss ends the drain and is repaired like any other.
"""

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import chain

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core import placement
from deadpool_run.core.copies import buddies, holders
from deadpool_run.core.decision import Decision
from deadpool_run.core.members import Member
from deadpool_run.core.recovery import repair, spare_pool
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import Relocation, Repair, State
from deadpool_run.core.transitions import ATTACHED, JobPhase, MemberPhase
from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.text import shortened

_NAMED = 8
"""Most ranks that a message names."""
_SPARE = (MemberPhase.READY, MemberPhase.PREPARING)


def requested(decision: Decision, event: ev.DrainRequested) -> None:
    """Begin a drain, or report why it is refused."""
    state = decision.state
    if why := refusal(state, event.rank, event.node):
        decision.announce(f"{_named(state, event.rank, event.node)} is not drained", why)
        return
    worker = None if event.rank is None else state.seats[event.rank].owner
    state.relocation = Relocation(decision.now, event.node, worker)
    if event.node is not None:
        decision.close_node(event.node)
    ranks = _ranks(member.held_rank for member in moving(state, state.relocation))
    decision.announce(
        f"draining {_named(state, event.rank, event.node)}",
        f"spares prepare for {ranks}" if ranks else "it has no ranks",
    )


def refusal(state: State, rank: Rank | None, node: NodeId | None) -> str:  # noqa: PLR0911 - one for each reason
    """Return why the rank or the node cannot be drained now; empty if it can."""
    if state.phase is not JobPhase.RUNNING:
        return f"ranks move only while the job is running, and it is {state.phase}"
    if state.relocation is not None:
        return "another drain is under way"
    if rank is not None and not 0 <= rank < len(state.seats):
        return f"there is no rank {rank}: ranks are 0 to {len(state.seats) - 1}"
    owner = None if rank is None else state.owner(rank)
    if rank is not None and (owner is None or owner.phase not in ATTACHED):
        return "no worker trains as this rank now"
    if node is not None and node not in state.nodes:
        return "there is no such node"
    if node is not None and node in state.closed:
        return "it is drained already"
    if node is not None and state.nodes.keys() - state.closed == {node}:
        return "there is no other node"
    leaving = () if node is None else state.ranks_on(node)
    needed = len(leaving) if rank is None else 1
    spares = [member for member in state.in_phase(*_SPARE) if member.node not in state.closed and member.node != node]
    if len(spares) < needed:
        where = "" if node is None else " on other nodes"
        return f"{_spares(needed)} needed{where}, and {len(spares)} {'is' if len(spares) == 1 else 'are'} ready"
    return ""


def _spares(number: int) -> str:
    return "1 spare is" if number == 1 else f"{number} spares are"


def _named(state: State, rank: Rank | None, node: NodeId | None) -> str:
    if node is None:
        return f"rank {rank}"
    return f"node {state.nodes[node].place.name if node in state.nodes else node}"


def _ranks(ranks: Iterable[Rank]) -> str:
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank {shortened(names, _NAMED)}" if names else ""


def moving(state: State, relocation: Relocation) -> list[Member]:
    """Return the workers whose ranks move."""
    if relocation.node is None:
        only = None if relocation.worker is None else state.members.get(relocation.worker)
        return [] if only is None else [only]
    owners = (state.owner(rank) for rank in sorted(state.ranks_on(relocation.node)))
    return [owner for owner in owners if owner is not None]


def _moves(relocation: Relocation, member: Member) -> bool:
    return member.node == relocation.node if relocation.worker is None else member.worker == relocation.worker


def advance(decision: Decision) -> None:
    """Advance the drain as far as the reports so far allow. Waits while a rank is missing."""
    state, relocation = decision.state, decision.state.relocation
    if relocation is None or state.repair is not None:
        return
    leaving = moving(state, relocation)
    if not leaving:
        state.relocation = None
    elif state.seat_counters.done:
        give_up(decision, "a rank has left its loop")
    elif state.count(*ATTACHED) == len(state.seats):  # else the loss of a rank will be reported
        _advance(decision, relocation, leaving)


def _advance(decision: Decision, relocation: Relocation, leaving: Collection[Member]) -> None:
    state = decision.state
    if relocation.meets_in != state.epoch:
        if _are_prepared(decision, leaving):
            _ask(decision, relocation)
    elif any(state.members[worker].phase is not MemberPhase.FINISHED for worker in relocation.waiting):
        return
    elif not relocation.is_set:
        _set_limit(decision, relocation)
    elif _seatings(decision, leaving) is not None:
        _move(decision, relocation, leaving)


def _seatings(decision: Decision, leaving: Collection[Member]) -> list[placement.Seating] | None:
    """Return a spare for each rank that moves; None while a spare rehearses. Too few spares end the drain."""
    state = decision.state
    if any(member.node not in state.closed for member in state.in_phase(MemberPhase.PREPARING)):
        return None
    found = placement.replacements(state, [state.seats[member.held_rank] for member in leaving])
    if len(found) == len(leaving):
        return found
    give_up(decision, f"{_spares(len(leaving))} needed, and {len(found)} {'is' if len(found) == 1 else 'are'} left")
    return None


def _are_prepared(decision: Decision, leaving: Collection[Member]) -> bool:
    """Start the rehearsals that are missing. Return whether none was missing.

    If spares cannot rehearse ahead of need, they rehearse as the ranks move.
    """
    seatings = _seatings(decision, leaving)
    if seatings is None:
        return False
    unprepared = [] if decision.state.unpreparable else [each for each in seatings if each.member.prepared is None]
    begun = [spare_pool.rehearse(decision, each.member, each.rank, each.local_rank) for each in unprepared]
    return not any(begun)


def _ask(decision: Decision, relocation: Relocation) -> None:
    """Ask every rank where it can stop."""
    relocation.meets_in, relocation.limit, relocation.is_set = decision.state.epoch, Version(0), False
    _limit(decision, relocation)


def _set_limit(decision: Decision, relocation: Relocation) -> None:
    """Order every rank to run to the version at which all can stop."""
    finished = [member.finished for member in decision.state.in_phase(MemberPhase.FINISHED)]
    relocation.limit = max(relocation.limit, *(each for each in finished if each is not None), Version(0))
    relocation.is_set = True
    _limit(decision, relocation)


def _limit(decision: Decision, relocation: Relocation) -> None:
    epoch = decision.state.epoch
    relocation.waiting = {member.worker for member in decision.state.in_phase(MemberPhase.RUNNING)}
    decision.effects += [do.LimitSteps(worker, epoch, relocation.limit) for worker in sorted(relocation.waiting)]


def limited(decision: Decision, member: Member, event: ev.StepsLimited) -> None:
    """Note where a rank can stop, or that it has reached the limit."""
    relocation = decision.state.relocation
    if relocation is None or relocation.meets_in != decision.state.epoch:
        return
    if not relocation.is_set:
        relocation.limit = max(relocation.limit, event.version)
        relocation.waiting.discard(member.worker)
    elif event.reached and event.version == relocation.limit:
        if not event.captured and _moves(relocation, member):
            give_up(decision, f"there is no memory for a snapshot of rank {member.rank}")
        relocation.waiting.discard(member.worker)


def _move(decision: Decision, relocation: Relocation, leaving: Collection[Member]) -> None:
    """Begin the repair in which the ranks move."""
    ranks = _ranks(member.held_rank for member in leaving)
    decision.state.repair = Repair(began_at=decision.now)
    repair.begin_epoch(decision, f"every rank has completed {relocation.limit} steps", f"moving {ranks}")
    relocation.moves_in = decision.state.epoch


def aborted(decision: Decision, member: Member, event: ev.AbortCompleted) -> None:
    """Note what a survivor holds; end it if its rank moves."""
    repair.aborted(decision, member, event)
    relocation = decision.state.relocation
    if relocation is None or relocation.moves_in != event.epoch or not _moves(relocation, member):
        return
    if relocation.limit not in event.captured:
        give_up(decision, f"rank {member.rank} has no snapshot of version {relocation.limit}")
        return
    decision.set_seat(member.held_rank, held=None)  # until its end is reported
    decision.kill(member.worker, "its rank was drained")
    decision.set_member(member.worker, blameless=True, planned=True)


def is_planned(state: State, member: Member) -> bool:
    """Return whether the worker's end is part of the repair under way, and not a further loss."""
    return member.planned and state.repair is not None and state.repair.resume is None


def left(decision: Decision, fallen: repair.LostRank) -> None:
    """Note the end of a worker whose rank moves."""
    repair.note_loss(decision, replace(fallen, cause="was drained"))
    rank, node = fallen.member.held_rank, fallen.member.node
    holders.left_behind(decision, rank, node, fallen.left or frozenset())
    if node in decision.state.closed:
        buddies.left_home(decision, rank, node)


def give_up(decision: Decision, why: str) -> None:
    """End the drain, if there is one. Ranks stay, and a drained node is used again.

    The drain of a node lasts until the node is released, because the repair of a loss may need the node.
    """
    state, relocation = decision.state, decision.state.relocation
    for node in sorted(state.closed - state.released):
        if relocation is None or relocation.node != node:
            decision.announce(f"{_named(state, None, node)} is not drained", why)
    if relocation is None:
        decision.end_relocation()
        return
    rank = (
        None
        if relocation.worker is None or relocation.worker not in state.members
        else state.members[relocation.worker].rank
    )
    what = "the rank" if relocation.node is None and rank is None else _named(state, rank, relocation.node)
    decision.announce(f"{what} is not drained", why)
    decision.end_relocation()
    if relocation.meets_in == state.epoch and state.phase is JobPhase.RUNNING:
        running = state.in_phase(MemberPhase.RUNNING)
        decision.effects += [do.LimitSteps(member.worker, state.epoch, None) for member in running]


def reopen(decision: Decision) -> None:
    """Use drained nodes again during a repair, if a rank has no other place: its spare was lost as it moved."""
    state = decision.state
    if state.closed != state.released and spare_pool.is_exhausted(decision.settings, state):
        give_up(decision, "no other node has a place for its ranks")


def next_deadline(settings: Settings, state: State) -> float | None:
    """Return the time at which the drain ends if its ranks have not moved."""
    if state.relocation is None or state.phase is not JobPhase.RUNNING:
        return None
    return state.relocation.began_at + settings.join_timeout_s


def overdue(decision: Decision) -> None:
    """End a drain that has taken too long."""
    give_up(decision, f"its ranks could not move within {decision.settings.join_timeout_s:g} s")


def release_nodes(decision: Decision) -> None:
    """Release the drained nodes that hold nothing the job needs."""
    state = decision.state
    if state.closed == state.released or state.phase is not JobPhase.RUNNING or state.repair is not None:
        return
    for node in sorted(state.closed - state.released):
        if state.is_left(node) and not _has_needed_copies(state, node):
            state.released |= {node}
            decision.announce(
                f"{_named(state, None, node)} is drained", "it has no ranks and no copies that are needed"
            )
            decision.effects.append(do.ReleaseNode(node))


def _has_needed_copies(state: State, node: NodeId) -> bool:
    """Return whether the node holds copies that other nodes lack. A job on one node has no copies."""
    return bool(state.buddies) and node in chain.from_iterable((*state.buddies, *state.former_buddies))
