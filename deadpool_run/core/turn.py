"""One decision under way: a draft of the next state, and the orders given so far."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.lifecycle import JOB_TRANSITIONS, MEMBER_TRANSITIONS, JobPhase, MemberPhase, trigger_of
from deadpool_run.core.membership import Member, Repair, Seat, State
from deadpool_run.core.placement import Seating
from deadpool_run.core.settings import Settings
from deadpool_run.core.tallies import Members, Seats, members_of, seats_of
from deadpool_run.ids import Epoch, NodeId, Rank, WorkerId

MemberOrder = (
    do.AssignRank
    | do.AbortStep
    | do.ResumeFrom
    | do.AttachGroups
    | do.ReleaseWorker
    | do.DismissWorker
    | do.KillWorker
    | do.TerminateWorker
)


class Turn:
    """Lives for one call of `coordinator.step`. Every change replaces `state`; nothing that the caller holds changes."""

    def __init__(self, settings: Settings, state: State, now: float) -> None:
        self.settings = settings
        self.before = state
        """As it was when the decision began."""
        self.state = state
        self.now = now
        self.effects: list[do.Effect] = []
        self._draft: tuple[dict[WorkerId, Member], list[Seat]] | None = None

    def set(self, **changes: Any) -> None:
        """Change fields of the state."""
        self.state = replace(self.state, **changes)

    def set_member(self, worker: WorkerId, **changes: Any) -> Member:
        """Change fields of one member and return it."""
        member = replace(self.state.members[worker], **changes)
        if self._draft is not None:
            self._draft[0][worker] = member
        else:
            self.set(members=members_of(self.state.members).having(member))
        return member

    def set_seat(self, rank: Rank, **changes: Any) -> Seat:
        """Change fields of one seat and return it."""
        seat = replace(self.state.seats[rank], **changes)
        if self._draft is not None:
            self._draft[1][rank] = seat
        else:
            self.set(seats=seats_of(self.state.seats).having(seat))
        return seat

    @contextmanager
    def for_all(self) -> Iterator[None]:
        """Change very many members and seats: within the block, each change is one and not a copy of all of them.

        Who is there does not change within it, and it is not for looking at the state as a whole.
        """
        assert self._draft is None, "one such block within another"
        members, seats = dict(self.state.members), list(self.state.seats)
        self._draft = (members, seats)
        self.set(members=members, seats=seats)
        try:
            yield
        finally:
            self._draft = None
            self.set(members=Members(members), seats=Seats(seats))

    def set_repair(self, **changes: Any) -> Repair:
        """Change fields of the repair under way and return it."""
        assert self.state.repair is not None
        repair = replace(self.state.repair, **changes)
        self.set(repair=repair)
        return repair

    def enter(self, phase: JobPhase, reason: str) -> None:
        """Move the job to a phase that may follow its present one."""
        assert phase in JOB_TRANSITIONS[self.state.phase], f"{self.state.phase} -> {phase}"
        self.set(phase=phase, reason=reason)

    def announce(self, what: str, reason: str) -> None:
        """Tell the user, and remember the reason."""
        self.set(reason=reason)
        self.effects.append(do.Announce(what, reason))

    def order(self, order: MemberOrder) -> None:
        """Give an order to a member and move it to the phase that the order leads to."""
        self.effects.append(order)
        trigger = trigger_of(order)
        if trigger is not None:
            phase = self.state.members[order.worker].phase
            self.set_member(order.worker, phase=MEMBER_TRANSITIONS[phase][trigger], since=self.now)

    def obeys(self, worker: WorkerId, fact: ev.Event) -> bool:
        """Tell whether the fact has a meaning in the member's phase."""
        member = self.state.members.get(worker)
        return member is not None and trigger_of(fact) in MEMBER_TRANSITIONS[member.phase]

    def accept(self, worker: WorkerId, fact: ev.Event) -> Member | None:
        """Move the member by what it says and return it; None if that says nothing (any more)."""
        if not self.obeys(worker, fact):
            return None
        trigger = trigger_of(fact)
        assert trigger is not None
        phase = MEMBER_TRANSITIONS[self.state.members[worker].phase][trigger]
        assert phase is not MemberPhase.ENDED, "reaped members are removed, not moved"
        return self.set_member(worker, phase=phase, since=self.now)

    def start_worker(self, node: NodeId) -> None:
        """Order one more process on this node."""
        worker = self.state.next_worker
        member = Member(worker=worker, node=node, phase=MemberPhase.STARTING, since=self.now)
        self.set(members=members_of(self.state.members).having(member), next_worker=WorkerId(worker + 1))
        self.effects.append(do.StartWorker(worker, node))

    def assign(self, seating: Seating, *, newcomer: bool, transcript_from: NodeId | None = None) -> None:
        """Give a ready worker a vacant rank."""
        member, rank, local_rank = seating.member, seating.rank, seating.local_rank
        self.set_seat(rank, owner=member.worker, node=member.node, local_rank=local_rank)
        self.set_member(member.worker, rank=rank, newcomer=newcomer)
        self.order(do.AssignRank(member.worker, rank, self.state.epoch, newcomer, local_rank, transcript_from))

    def kill(self, worker: WorkerId, reason: str) -> None:
        """End a worker outright; its exit follows."""
        self.order(do.KillWorker(worker, ev.KillHow.SIGKILL, reason))
        kills = self.state.members[worker].kills + 1
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
