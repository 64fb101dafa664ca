"""Counts of members by phase and node, and of seats by condition, so that handling a report scans neither."""

from collections import Counter
from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from typing import TypeVar

from deadpool_run.core.members import Member, Seat
from deadpool_run.core.transitions import TIMED, MemberPhase
from deadpool_run.ids import NodeId, Rank, WorkerId

LEAVING = frozenset({MemberPhase.ENDING, MemberPhase.DISMISSED})
"""Phases of members that do not count as alive on their node."""

K = TypeVar("K")
V = TypeVar("V")


class MemberCounters:
    """Members by phase and by node. Empty groups are left out."""

    __slots__ = ("_members", "_waits", "alive", "bound", "by_node", "by_phase", "claiming", "stepped")

    def __init__(self, members: Mapping[WorkerId, Member]) -> None:
        self._members = members
        self.by_phase: dict[MemberPhase, set[WorkerId]] = {}
        self.by_node: dict[NodeId, set[WorkerId]] = {}
        self.alive: Counter[NodeId] = Counter()
        """Members that are not about to leave, by node."""
        self.stepped = 0
        """Members that hold a rank and have completed a step since they attached."""
        self.bound = 0
        """Members that hold a rank, or that a rank waits for."""
        self.claiming = 0
        """Members that a rank waits for."""
        self._waits: dict[MemberPhase, list[tuple[float, WorkerId]]] = {}
        """Per phase with a time limit: a heap of the times when it began for each member. Old entries are dropped late."""
        for member in members.values():
            self.add(member)

    def add(self, member: Member) -> None:
        """Count a new member."""
        self.by_node.setdefault(member.node, set()).add(member.worker)
        self.count(member)

    def remove(self, member: Member) -> None:
        """Leave out a member."""
        _leave(self.by_node, member.node, member.worker)
        self.uncount(member)

    def count(self, member: Member) -> None:
        """Count what may change of a member, after a change."""
        phase, worker = member.phase, member.worker
        self.by_phase.setdefault(phase, set()).add(worker)
        self._count(member, 1)
        if phase in TIMED:
            heappush(self._waits.setdefault(phase, []), (member.patience_from, worker))

    def uncount(self, member: Member) -> None:
        """Leave out what may change of a member, before a change."""
        _leave(self.by_phase, member.phase, member.worker)
        self._count(member, -1)
        if member.phase not in self.by_phase:
            self._waits.pop(member.phase, None)

    def note_step(self, member: Member, *, stepped: bool) -> None:
        """Count whether a member has completed a step, before that changes. Nothing else changes that is counted, but for its phase."""
        if member.rank is not None:
            self.stepped += stepped - member.stepped

    def moved(self, member: Member, phase: MemberPhase) -> None:
        """Count the present phase of a member, and since when, instead of this one. Nothing else has changed that is counted."""
        now = member.phase
        if now is not phase:
            _leave(self.by_phase, phase, member.worker)
            if phase not in self.by_phase:
                self._waits.pop(phase, None)
            self.by_phase.setdefault(now, set()).add(member.worker)
            if by := (phase in LEAVING) - (now in LEAVING):
                self.alive[member.node] += by
        if now in TIMED:
            heappush(self._waits.setdefault(now, []), (member.patience_from, member.worker))

    def _count(self, member: Member, by: int) -> None:
        holds_rank, claims = member.rank is not None, member.claimed is not None
        if member.phase not in LEAVING:
            self.alive[member.node] += by
        self.stepped += by * (holds_rank and member.stepped)
        self.bound += by * (holds_rank or claims)
        self.claiming += by * claims

    def longest_waiting(self, phase: MemberPhase) -> Member | None:
        """Return the member whose time limit in this phase began first; of several, the oldest."""
        waits = self._waits.get(phase, ())
        while waits:
            began_at, worker = waits[0]
            member = self._members.get(worker)
            if member is not None and member.phase is phase and member.patience_from == began_at:
                return member
            heappop(waits)
        return None


class SeatCounters:
    """Seats by condition and by node. Empty groups are left out."""

    __slots__ = ("by_node", "done", "searched", "unknown", "unrehearsable", "vacant")

    def __init__(self, seats: Iterable[Seat] = ()) -> None:
        self.vacant: set[Rank] = set()
        """Ranks that need a worker."""
        self.searched: set[Rank] = set()
        """Ranks of which copies are known, or were asked for."""
        self.by_node: dict[NodeId, set[Rank]] = {}
        self.done = 0
        self.unrehearsable = 0
        self.unknown = 0
        """Ranks of which it is not known what they hold."""
        for seat in seats:
            self.add(seat)

    def add(self, seat: Seat) -> None:
        """Count a seat that is new or has changed."""
        if seat.is_vacant:
            self.vacant.add(seat.rank)
        if seat.copies or seat.asked:
            self.searched.add(seat.rank)
        if seat.node is not None:
            self.by_node.setdefault(seat.node, set()).add(seat.rank)
        self.done += seat.done
        self.unrehearsable += not seat.rehearsable
        self.unknown += seat.held is None

    def remove(self, seat: Seat) -> None:
        """Leave out a seat that is about to change."""
        self.vacant.discard(seat.rank)
        self.searched.discard(seat.rank)
        if seat.node is not None:
            _leave(self.by_node, seat.node, seat.rank)
        self.done -= seat.done
        self.unrehearsable -= not seat.rehearsable
        self.unknown -= seat.held is None


def _leave(groups: dict[K, set[V]], key: K, value: V) -> None:
    group = groups[key]
    group.remove(value)
    if not group:
        del groups[key]
