"""A decision under way: the setters that change the state, and the orders given so far."""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core import places
from deadpool_run.core.counters import LEAVING, SeatCounters
from deadpool_run.core.injection import KillHow
from deadpool_run.core.members import Member, Seat, vacant_seats
from deadpool_run.core.placement import Seating
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NodeRecord, Repair, State
from deadpool_run.core.transitions import JOB_TRANSITIONS, MEMBER_TRANSITIONS, JobPhase, MemberPhase, trigger_of
from deadpool_run.ids import Epoch, NodeId, Rank, WorkerId

_TIMED = frozenset({"phase", "since", "ending_grace_s"})
_COUNTED = frozenset({"rank", "claimed"})
"""Fields of a member that `MemberCounters` counts and that can change, other than those of its phase, its time and its step."""


@dataclass(slots=True)
class Changes:
    """The changes of this decision so far. Its later parts do nothing where nothing has changed for them."""

    joined: list[NodeId] = field(default_factory=list)
    nodes_lost: bool = False
    """Or nodes closed, or opened again."""
    alive: set[NodeId] = field(default_factory=set)
    """Nodes that a worker came to or is about to leave."""
    done: bool = False
    """The number of ranks that are done."""
    placement: bool = False
    """The node of some rank."""
    shortages: bool = False
    """The nodes that have memory for copies."""
    vacancies: bool = False
    """Vacant ranks, what is known of their copies, or the workers that can take one."""


class Decision:
    """Lives for one call of `coordinator.step`. It changes the state in place."""

    def __init__(self, settings: Settings, state: State, now: float) -> None:
        self.settings = settings
        self.state = state
        self.now = now
        self.effects: list[do.Effect] = []
        self.changes = Changes()
        self.phase_before = state.phase
        self.limited_before = places.are_limited(state)
        self.all_rehearsable_before = not state.seat_counters.unrehearsable

    @property
    def repair(self) -> Repair:
        """The repair under way; there must be one."""
        assert self.state.repair is not None
        return self.state.repair

    # --- the setters ----------------------------------------------------------------------------------------------

    def set_member(self, worker: WorkerId, **changes: Any) -> Member:
        """Change fields of one member and return it."""
        state = self.state
        member = state.members[worker]
        phase, claimed = member.phase, member.claimed
        is_counted = not _COUNTED.isdisjoint(changes)
        if is_counted:
            state.member_counters.uncount(member)
        elif "stepped" in changes:
            state.member_counters.note_step(member, stepped=changes["stepped"])
        for name, value in changes.items():
            setattr(member, name, value)
        if is_counted:
            state.member_counters.count(member)
        elif not _TIMED.isdisjoint(changes):
            state.member_counters.moved(member, phase)
        if member.phase is not phase:
            self._note_phase(member, phase)
        if member.claimed != claimed:
            self.changes.vacancies = True
        return member

    def _move(self, member: Member, phase: MemberPhase, changes: dict[str, Any]) -> None:
        """Move a member to this phase as of now, with these changes. Cheap, as most reports and orders do it."""
        if changes:
            self.set_member(member.worker, **changes)
        before = member.phase
        member.phase, member.since = phase, self.now
        self.state.member_counters.moved(member, before)
        if phase is not before:
            self._note_phase(member, before)

    def _note_phase(self, member: Member, before: MemberPhase) -> None:
        if before is MemberPhase.READY or member.phase is MemberPhase.READY:
            self.changes.vacancies = True
        if (before in LEAVING) is not (member.phase in LEAVING):
            self.changes.alive.add(member.node)

    def set_seat(self, rank: Rank, **changes: Any) -> Seat:
        """Change fields of one seat and return it."""
        state, seen = self.state, self.changes
        seat = state.seats[rank]
        if changes.keys() == {"held"}:
            state.seat_counters.unknown += (changes["held"] is None) - (seat.held is None)
            seat.held = changes["held"]
            return seat
        was_vacant, node, done = seat.is_vacant, seat.node, seat.done
        copies, asked = seat.copies, seat.asked
        state.seat_counters.remove(seat)
        for name, value in changes.items():
            setattr(seat, name, value)
        state.seat_counters.add(seat)
        if seat.is_vacant is not was_vacant or seat.copies != copies or seat.asked != asked:
            seen.vacancies = True
        if seat.node != node:
            seen.placement = True
        if seat.done is not done:
            seen.done = True
        return seat

    def add_member(self, member: Member) -> None:
        """Add a worker."""
        self.state.members[member.worker] = member
        self.state.member_counters.add(member)
        self._came_or_went(member)

    def remove(self, member: Member) -> None:
        """Forget a worker, and vacate its seat."""
        if member.rank is not None:
            self.set_seat(member.rank, owner=None)
        del self.state.members[member.worker]
        self.state.member_counters.remove(member)
        self._came_or_went(member)

    def _came_or_went(self, member: Member) -> None:
        if member.phase not in LEAVING:
            self.changes.alive.add(member.node)
        if member.phase is MemberPhase.READY or member.claimed is not None:
            self.changes.vacancies = True

    def vacate_all(self) -> None:
        """Begin a world: no rank is held, and nothing is known of any."""
        self.state.seats = vacant_seats(self.settings.world_size)
        self.state.seat_counters = SeatCounters(self.state.seats)
        self.changes.vacancies = self.changes.placement = self.changes.done = True

    def add_node(self, node: NodeId, place: ev.Place) -> None:
        """Add a node. The pool of spares gives it workers."""
        state = self.state
        if node in state.failure_domains:
            return  # a node joins once
        state.nodes[node] = NodeRecord(node, place, state.arrivals)
        state.failure_domains[node] = place.failure_domain
        state.arrivals += 1
        state.joined_at = self.now
        self.changes.joined.append(node)

    def remove_nodes(self, lost: Collection[NodeId]) -> None:
        """Forget lost nodes."""
        state = self.state
        state.nodes = {node: kept for node, kept in state.nodes.items() if node not in lost}
        state.joined_at = self.now
        places.forget(state, lost)
        for node in lost:
            state.shortages.pop(node, None)
        state.closed, state.released = state.closed.difference(lost), state.released.difference(lost)
        if state.relocation is not None and state.relocation.node in lost:
            state.relocation = None
        self.changes.nodes_lost = True

    def close_node(self, node: NodeId) -> None:
        """Give the node no more ranks and workers, and end its spares."""
        self.state.closed |= {node}
        self.changes.nodes_lost = True
        for member in self.state.on_node(node):
            if member.phase in (MemberPhase.READY, MemberPhase.PREPARING):
                self.order(do.DismissWorker(member.worker))
            elif member.phase is MemberPhase.STARTING:
                self.kill(member.worker, "its node is drained")

    def end_relocation(self) -> None:
        """Forget a drain that is not complete. Nodes that may not leave yet are used again."""
        self.state.relocation = None
        if self.state.closed != self.state.released:
            self.state.closed = self.state.released
            self.changes.nodes_lost = self.changes.vacancies = True

    # --- decisions ------------------------------------------------------------------------------------------------

    def enter(self, phase: JobPhase, reason: str) -> None:
        """Move the job to a phase that may follow its present one."""
        assert phase in JOB_TRANSITIONS[self.state.phase], f"{self.state.phase} -> {phase}"
        self.state.phase, self.state.reason = phase, reason

    def announce(self, what: str, reason: str, *, ours: bool = False, detail: bool = False) -> None:
        """Tell the user, and remember the reason. `detail`: only if the user asked for details."""
        self.state.reason = reason
        self.effects.append(do.Announce(what, reason, ours, detail))

    def order(self, order: do.MemberOrder, **changes: Any) -> None:
        """Give an order to a member and move it, with these changes, to the phase that the order leads to."""
        self.effects.append(order)
        trigger = trigger_of(order)
        if trigger is not None:
            member = self.state.members[order.worker]
            self._move(member, MEMBER_TRANSITIONS[member.phase][trigger], changes)

    def concerned(self, event: ev.WorkerEvent) -> Member | None:
        """Return the event's member; None if the event has no meaning in the member's phase."""
        member = self.state.members.get(event.worker)
        return member if member is not None and type(event) in MEMBER_TRANSITIONS[member.phase] else None

    def accept(self, event: ev.WorkerEvent, **changes: Any) -> Member | None:
        """Move the event's member, with these changes, and return it; None if the event has no meaning in its phase."""
        member = self.concerned(event)
        if member is None:
            return None
        phase = MEMBER_TRANSITIONS[member.phase][type(event)]
        assert phase is not MemberPhase.ENDED, "reaped members are removed, not moved"
        self._move(member, phase, changes)
        return member

    def start_worker(self, node: NodeId) -> None:
        """Order another worker on this node."""
        worker = self.state.next_worker
        self.state.next_worker = WorkerId(worker + 1)
        self.add_member(Member(worker, node, MemberPhase.STARTING, self.now))
        self.effects.append(do.StartWorker(worker, node))

    def assign(self, seating: Seating, *, replacement: bool, transcript_from: NodeId | None = None) -> None:
        """Give a ready worker a vacant rank."""
        member, rank, local_rank = seating.member, seating.rank, seating.local_rank
        self.set_seat(rank, owner=member.worker, node=member.node, local_rank=local_rank)
        self.set_member(member.worker, rank=rank, replacement=replacement)
        self.order(do.AssignRank(member.worker, rank, self.state.epoch, replacement, local_rank, transcript_from))

    def kill(self, worker: WorkerId, reason: str) -> None:
        """Send the worker SIGKILL; its exit follows."""
        self.order(do.KillWorker(worker, KillHow.SIGKILL, reason))
        kills = self.state.members[worker].kills + 1
        self.set_member(worker, ending_why=reason, ending_grace_s=0.0, kills=kills)

    def end(self, member: Member, reason: str) -> None:
        """Tell the user that the worker is ended, and send it SIGKILL."""
        who = f"worker {member.worker}" if member.rank is None else f"rank {member.rank}, worker {member.worker}"
        self.announce(f"ending {who}", reason)
        self.kill(member.worker, reason)

    def terminate(self, worker: WorkerId, signal: int, reason: str) -> None:
        """Send the worker a signal and, after the grace, SIGKILL; its exit follows."""
        grace_s = self.settings.shutdown_timeout_s
        self.order(do.TerminateWorker(worker, int(signal), grace_s))
        self.set_member(worker, ending_why=reason, ending_grace_s=grace_s)

    def next_epoch(self) -> Epoch:
        """Begin a new membership. Reports of older ones are ignored from now on."""
        self.state.epoch = Epoch(self.state.epoch + 1)
        self.state.suspicion = None
        return self.state.epoch
