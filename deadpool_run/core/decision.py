"""One decision under way: a draft of the next state, and the orders given so far."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.changes import changed
from deadpool_run.core.injection import KillHow
from deadpool_run.core.placement import Seating
from deadpool_run.core.rows import Members, Seats, members_of, seats_of
from deadpool_run.core.settings import Settings
from deadpool_run.core.shelves import Draft
from deadpool_run.core.state import Member, Repair, Seat, State
from deadpool_run.core.transitions import JOB_TRANSITIONS, MEMBER_TRANSITIONS, JobPhase, MemberPhase, trigger_of
from deadpool_run.ids import Epoch, NodeId, Rank, WorkerId

MemberOrder = (
    do.AssignRank
    | do.PrepareSpare
    | do.AbortStep
    | do.ReEnter
    | do.ResumeFrom
    | do.AttachGroups
    | do.ReleaseWorker
    | do.DismissWorker
    | do.KillWorker
    | do.TerminateWorker
)


class Decision:
    """Lives for one call of `coordinator.step`. Every change replaces `state`; nothing that the caller holds changes."""

    def __init__(self, settings: Settings, state: State, now: float) -> None:
        self.settings = settings
        if not (
            isinstance(state.members, Members) and isinstance(state.seats, Seats)
        ):  # it was read, or made by a test
            state = changed(state, members=Members(state.members), seats=Seats(state.seats))
        self.before = state
        """As it was when the decision began."""
        self.state = state
        self.now = now
        self.effects: list[do.Effect] = []
        self._draft: tuple[Draft[WorkerId, Member], Draft[Rank, Seat]] | None = None

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = changed(self.state, **changes)

    def set_member(self, worker: WorkerId, **changes: Any) -> Member:
        """Change fields of one member and return it."""
        if self._draft is not None:
            member = self._draft[0][worker] = changed(self._draft[0][worker], **changes)
        else:
            member = changed(self.state.members[worker], **changes)
            self.set(members=members_of(self.state.members).having(worker, member))
        return member

    def set_seat(self, rank: Rank, **changes: Any) -> Seat:
        """Change fields of one seat and return it."""
        if self._draft is not None:
            seat = self._draft[1][rank] = changed(self._draft[1][rank], **changes)
        else:
            seat = changed(self.state.seats[rank], **changes)
            self.set(seats=seats_of(self.state.seats).having(seat))
        return seat

    @contextmanager
    def for_all(self) -> Iterator[None]:
        """Change many members and seats: they are filed together, at the end of the block.

        Within it, `state` is still without these changes; `member` and `seat` have them. Who is there does not change.
        """
        assert self._draft is None, "one such block within another"
        members, seats = members_of(self.state.members), seats_of(self.state.seats)
        self._draft = (Draft(members.__getitem__), Draft(seats.__getitem__))
        try:
            yield
        finally:
            (of_members, of_seats), self._draft = self._draft, None
            if of_members:
                self.set(members=members.having_all(of_members))
            if of_seats:
                self.set(seats=seats.having_all(of_seats))

    def member(self, worker: WorkerId) -> Member:
        """Return a member with all changes so far."""
        return self.state.members[worker] if self._draft is None else self._draft[0][worker]

    def seat(self, rank: Rank) -> Seat:
        """Return a seat with all changes so far."""
        return self.state.seats[rank] if self._draft is None else self._draft[1][rank]

    def set_repair(self, **changes: Any) -> Repair:
        """Change fields of the repair under way and return it."""
        assert self.state.repair is not None
        repair = changed(self.state.repair, **changes)
        self.set(repair=repair)
        return repair

    def enter(self, phase: JobPhase, reason: str) -> None:
        """Move the job to a phase that may follow its present one."""
        assert phase in JOB_TRANSITIONS[self.state.phase], f"{self.state.phase} -> {phase}"
        self.set(phase=phase, reason=reason)

    def announce(self, what: str, reason: str, *, ours: bool = False) -> None:
        """Tell the user, and remember the reason."""
        self.set(reason=reason)
        self.effects.append(do.Announce(what, reason, ours))

    def order(self, order: MemberOrder) -> None:
        """Give an order to a member and move it to the phase that the order leads to."""
        self.effects.append(order)
        trigger = trigger_of(order)
        if trigger is not None:
            phase = self.member(order.worker).phase
            self.set_member(order.worker, phase=MEMBER_TRANSITIONS[phase][trigger], since=self.now)

    def obeys(self, worker: WorkerId, fact: ev.Event) -> bool:
        """Tell whether the fact has a meaning in the member's phase."""
        member = self.state.members.get(worker)
        return member is not None and trigger_of(fact) in MEMBER_TRANSITIONS[member.phase]

    def accept(self, worker: WorkerId, fact: ev.Event, **changes: Any) -> Member | None:
        """Move the member by what it says, with these changes, and return it; None if that says nothing (any more)."""
        if not self.obeys(worker, fact):
            return None
        trigger = trigger_of(fact)
        assert trigger is not None
        phase = MEMBER_TRANSITIONS[self.state.members[worker].phase][trigger]
        assert phase is not MemberPhase.ENDED, "reaped members are removed, not moved"
        return self.set_member(worker, phase=phase, since=self.now, **changes)

    def add_member(self, member: Member) -> None:
        """Note a worker that was not known."""
        self.set(members=members_of(self.state.members).having(member.worker, member))

    def start_worker(self, node: NodeId) -> None:
        """Order one more process on this node."""
        worker = self.state.next_worker
        member = Member(worker=worker, node=node, phase=MemberPhase.STARTING, since=self.now)
        self.add_member(member)
        self.set(next_worker=WorkerId(worker + 1))
        self.effects.append(do.StartWorker(worker, node))

    def assign(self, seating: Seating, *, replacement: bool, transcript_from: NodeId | None = None) -> None:
        """Give a ready worker a vacant rank."""
        member, rank, local_rank = seating.member, seating.rank, seating.local_rank
        self.set_seat(rank, owner=member.worker, node=member.node, local_rank=local_rank)
        self.set_member(member.worker, rank=rank, replacement=replacement)
        self.order(do.AssignRank(member.worker, rank, self.state.epoch, replacement, local_rank, transcript_from))

    def kill(self, worker: WorkerId, reason: str) -> None:
        """End a worker outright; its exit follows."""
        self.order(do.KillWorker(worker, KillHow.SIGKILL, reason))
        kills = self.member(worker).kills + 1
        self.set_member(worker, ending_why=reason, ending_grace_s=0.0, kills=kills)

    def terminate(self, worker: WorkerId, signal: int, reason: str) -> None:
        """End a worker with a signal and, after the grace, outright; its exit follows."""
        grace_s = self.settings.shutdown_timeout_s
        self.order(do.TerminateWorker(worker, int(signal), grace_s))
        self.set_member(worker, ending_why=reason, ending_grace_s=grace_s)

    def remove(self, member: Member) -> None:
        """Forget a worker that is no more, and vacate its seat."""
        if member.rank is not None:
            self.set_seat(member.rank, owner=None)
        self.set(members=members_of(self.state.members).without(member.worker))

    def next_epoch(self) -> Epoch:
        """Begin a new membership: whatever was said in an older one is not obeyed from here on."""
        self.set(epoch=Epoch(self.state.epoch + 1), suspicion=None)
        return self.state.epoch
