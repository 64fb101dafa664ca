"""The versions that each rank can be restored to: its own, and copies in its node's vault or on other nodes."""

from collections.abc import Collection, Iterable, Sequence

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.decision import Decision
from deadpool_run.core.members import NO_VERSION, Copies, Member, Seat
from deadpool_run.core.state import State
from deadpool_run.ids import NodeId, Rank, Version


def left_behind(decision: Decision, rank: Rank, node: NodeId, versions: frozenset[Version]) -> None:
    """Note what a dead owner left in the vault of its living node."""
    _set(decision, rank, {node: versions}, frozenset())


def ask(decision: Decision, rank: Rank, but: NodeId | None = None) -> None:
    """Ask every node that may have copies of the rank, except `but`. The vault of the rank's own node is gone."""
    _ask(decision, rank, {}, but)


def ask_too(decision: Decision) -> bool:
    """Ask the nodes about every rank, once in this epoch, for versions that are not known; return whether there are any nodes.

    A replacement's node has no slot with a version that is older than the one that it resumed from. Another node may, and this
    one as well: a third copy stayed a copy when the rank moved there, or a parity has it.
    """
    state = decision.state
    if decision.repair.searched_in == state.epoch:
        return False
    decision.repair.searched_in = state.epoch
    for seat in state.seats:
        if seat.asked_in != state.epoch or state.term:  # a new leader has left out some answers
            known = dict(seat.copies)
            if not known and seat.owner is not None and seat.node is not None:
                known = {seat.node: seat.held or frozenset()}
            _ask(decision, seat.rank, known)
    return bool(state.seat_counters.unknown)


def _ask(decision: Decision, rank: Rank, known: Copies, but: NodeId | None = None) -> None:
    """Ask every node that may have copies of the rank, except `but`, and note what is known."""
    state = decision.state
    failed_sources = frozenset() if state.repair is None else state.repair.failed_sources
    likely = [node for buddies in (state.buddies, state.former_buddies) if buddies for node in buddies[rank]]
    asked = [
        node
        for node in dict.fromkeys(likely)
        if node in state.nodes and node != but and (rank, node) not in failed_sources
    ]
    _set(decision, rank, known, frozenset(asked))
    decision.set_seat(rank, asked_in=state.epoch)
    if state.repair is not None and asked:
        state.repair.asked_at = decision.now
    decision.effects += [do.ReportReplicas(node, rank, state.epoch) for node in asked]


def reported(decision: Decision, event: ev.ReplicasReported) -> None:
    """Note what a node holds, next to what is known of it, if it answers the last question."""
    state = decision.state
    seat = state.seats[event.rank] if 0 <= event.rank < len(state.seats) else None
    if seat is not None and event.node in seat.asked and event.epoch == seat.asked_in:
        versions = seat.copies.get(event.node, frozenset()) | frozenset(event.versions)
        held = {event.node: versions} if versions or not state.term else {}
        copies, asked = {**seat.copies, **held}, seat.asked - {event.node}
        wants_old = state.repair is not None and state.repair.searched_in == state.epoch
        is_filtered = state.term and not asked and seat.owner is None and not wants_old
        _set(decision, event.rank, _of_the_last_stay(copies) if is_filtered else copies, asked)


def give_up(decision: Decision) -> None:
    """Stop waiting for nodes that do not answer: they count as holding nothing."""
    state = decision.state
    decision.repair.asked_at = None
    for rank in sorted(state.seat_counters.searched):
        seat = state.seats[rank]
        if seat.asked:
            decision.repair.failed_sources |= {(rank, node) for node in seat.asked}
            names = ", ".join(sorted(state.nodes[node].place.name for node in seat.asked if node in state.nodes))
            decision.announce(
                f"rank {rank} gives up the copies on {names}",
                f"no answer came within {decision.settings.repair_timeout_s:g} s",
            )
            _set(decision, rank, seat.copies, frozenset())


def _of_the_last_stay(copies: Copies) -> Copies:
    """Drop stale copies on nodes where the rank lived earlier: a replacement there would load them."""
    newest = max(copies.values(), key=lambda held: max(held, default=NO_VERSION), default=frozenset[Version]())
    return {
        node: held for node, held in copies.items() if max(held, default=NO_VERSION) >= min(newest, default=NO_VERSION)
    }


def is_only_source(state: State, member: Member, node: NodeId) -> bool:
    """Return whether no other node may have copies of the member's rank, and this one lives.

    A survivor fetches a version because it does not have it: only nodes with that version count.
    """
    seat, resume = state.seats[member.held_rank], None if state.repair is None else state.repair.resume
    holders = {each for each, held in seat.copies.items() if member.replacement or resume in held}
    return node in state.nodes and holders | seat.asked == {node}


def forget(decision: Decision, rank: Rank, node: NodeId) -> bool:
    """Give up the node's copies of the rank; if there are no others, ask the other nodes. False: it held none."""
    seat = decision.state.seats[rank]
    if node not in seat.copies and node not in seat.asked:
        return False
    copies = {other: versions for other, versions in seat.copies.items() if other != node}
    if copies or seat.asked - {node}:
        _set(decision, rank, copies, seat.asked - {node})
    else:
        ask(decision, rank, but=node)
    return True


def forget_nodes(decision: Decision, lost: Collection[NodeId]) -> bool:
    """Give up the copies on lost nodes. False: no rank under repair needs them."""
    searched = sorted(decision.state.seat_counters.searched)
    were_needed = [forget(decision, rank, node) for rank in searched for node in lost]
    return any(were_needed)


def settled(decision: Decision) -> None:
    """End every search: each rank's worker has its state."""
    for rank in sorted(decision.state.seat_counters.searched):
        decision.set_seat(rank, copies={}, asked=frozenset())


def resumed(decision: Decision, version: Version) -> None:
    """Note that nodes forget copies of newer versions."""
    for rank in sorted(decision.state.seat_counters.searched):
        copies = decision.state.seats[rank].copies
        kept = {node: held_after_resume(held, version) for node, held in copies.items()}
        decision.set_seat(rank, copies=kept)


def nearest(seat: Seat, member: Member, version: Version | None) -> NodeId | None:
    """Return the node from which a rank's worker gets this version (None: the transcript); None if its own node has it."""
    holders = [node for node, held in seat.copies.items() if version is None or version in held]
    if not holders or member.node in holders:
        return None
    return holders[0]


def describe_loss(state: State) -> str:
    """Return which ranks no node holds, for the user."""
    lost = [str(seat.rank) for seat in state.seats if seat.held is not None and not seat.held] if state.buddies else []
    return f"every holder of rank {', '.join(lost)} is gone; " if lost else ""


def _set(decision: Decision, rank: Rank, copies: Copies, asked: frozenset[NodeId]) -> None:
    held = None if asked else frozenset(version for versions in copies.values() for version in versions)
    decision.set_seat(rank, copies=copies, asked=asked, held=held)


# --- versions -------------------------------------------------------------------------------------------------------


def held_by_survivor(aborted: ev.AbortCompleted) -> frozenset[Version]:
    """Return what a survivor's rank holds: the versions in its slots, and that of its objects."""
    return frozenset(aborted.captured) if aborted.live is None else frozenset({*aborted.captured, aborted.live})


def held_after_death(exited: ev.WorkerExited) -> frozenset[Version]:
    """Return what a dead worker's rank holds: the versions in its slots, which outlive it."""
    return frozenset(exited.captured)


def held_after_resume(held: Iterable[Version], resumed: Version) -> frozenset[Version]:
    """Return what is left of a rank's versions after the order to resume: newer slots may be overwritten."""
    return frozenset(version for version in held if version <= resumed)


def newest_common(held: Sequence[frozenset[Version]]) -> Version | None:
    """Return the newest version that every rank holds, or None."""
    return max(frozenset.intersection(*held), default=None)


def describe(seats: Iterable[Seat]) -> str:
    """Return which rank holds which versions, for the user."""
    return "; ".join(
        f"rank {seat.rank}: {', '.join(str(version) for version in sorted(seat.held)) if seat.held else 'nothing'}"
        for seat in seats
    )
