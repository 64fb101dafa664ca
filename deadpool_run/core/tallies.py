"""Members and seats that know how many of them are how. Pure.

A world has tens of thousands of members, and each of them says something at each change of the world: no word may cost a
look at all of them. So what is asked after every word is counted on from one state to the next. Any other mapping or
tuple will do in a state as well (one that was read from JSON, or made by a test): it is counted when it is asked.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from deadpool_run.core.lifecycle import MemberPhase
from deadpool_run.ids import NodeId, Rank, Version, WorkerId

LEAVING = frozenset({MemberPhase.ENDING, MemberPhase.DISMISSED})
"""Phases of members that do not count as alive on their node."""


class MemberLike(Protocol):
    """What is counted of a member."""

    @property
    def worker(self) -> WorkerId: ...  # noqa: D102 - as the classes have it
    @property
    def node(self) -> NodeId: ...  # noqa: D102 - as the classes have it
    @property
    def phase(self) -> MemberPhase: ...  # noqa: D102 - as the classes have it
    @property
    def since(self) -> float: ...  # noqa: D102 - as the classes have it
    @property
    def rank(self) -> Rank | None: ...  # noqa: D102 - as the classes have it
    @property
    def stepped(self) -> bool: ...  # noqa: D102 - as the classes have it


class SeatLike(Protocol):
    """What is counted of a seat."""

    @property
    def rank(self) -> Rank: ...  # noqa: D102 - as the classes have it
    @property
    def owner(self) -> WorkerId | None: ...  # noqa: D102 - as the classes have it
    @property
    def sealed(self) -> bool: ...  # noqa: D102 - as the classes have it
    @property
    def done(self) -> bool: ...  # noqa: D102 - as the classes have it
    @property
    def held(self) -> frozenset[Version] | None: ...  # noqa: D102 - as the classes have it
    @property
    def node(self) -> NodeId | None: ...  # noqa: D102 - as the classes have it


@dataclass(frozen=True, slots=True)
class MemberTally:
    """Never changed in place, nor is anything in it."""

    phases: Mapping[MemberPhase, Mapping[WorkerId, float]]
    """Who is in which phase, and since when; phases that nobody is in are left out."""
    alive: Mapping[NodeId, int]
    """Members that are not about to leave, by node. The same object as long as none of these numbers changes."""
    stepped: int
    """Members that hold a rank and have completed a step since they attached."""

    def changed(self, old: MemberLike | None, new: MemberLike | None) -> "MemberTally":
        """Return the tally after one member became another: None is one that is not there."""
        phases, alive = self.phases, self.alive
        before = None if old is None else (old.phase, old.since)
        after = None if new is None else (new.phase, new.since)
        if before != after:
            phases = _moved(phases, old, new)
        before_at = None if old is None or old.phase in LEAVING else old.node
        after_at = None if new is None or new.phase in LEAVING else new.node
        if before_at != after_at:
            counts = dict(alive)
            for node, step in ((before_at, -1), (after_at, 1)):
                if node is not None:
                    counts[node] = counts.get(node, 0) + step
            alive = {node: count for node, count in counts.items() if count}
        return MemberTally(phases, alive, self.stepped + _has_stepped(new) - _has_stepped(old))


@dataclass(frozen=True, slots=True)
class SeatTally:
    """Never changed in place, nor is anything in it."""

    vacant: frozenset[Rank]
    """Those that need a worker."""
    done: int
    unsealed: int
    unknown: int
    """Those of which it is not known what they hold."""
    homes: object
    """The same as long as every seat is on the node that it was on."""

    def changed(self, old: SeatLike, new: SeatLike) -> "SeatTally":
        """Return the tally after one seat became another."""
        vacant = self.vacant
        if (is_vacant := _is_vacant(new)) != _is_vacant(old):
            vacant = vacant | {new.rank} if is_vacant else vacant - {new.rank}
        return replace(
            self,
            vacant=vacant,
            done=self.done + new.done - old.done,
            unsealed=self.unsealed + old.sealed - new.sealed,
            unknown=self.unknown + (new.held is None) - (old.held is None),
            homes=self.homes if new.node == old.node else object(),
        )


M = TypeVar("M", bound=MemberLike)
S = TypeVar("S", bound=SeatLike)


class Members(dict[WorkerId, M]):
    """Members by number. Never changed in place once it is part of a state."""

    __slots__ = ("_tally",)

    def __init__(self, members: Any = ()) -> None:
        super().__init__(members)
        self._tally: MemberTally | None = None

    @property
    def tally(self) -> MemberTally:
        """What is counted of them."""
        if self._tally is None:
            self._tally = _count_members(self.values())
        return self._tally

    def having(self, member: M) -> "Members[M]":
        """Return these with this one, in the place of the one with its number."""
        tally = self.tally.changed(self.get(member.worker), member)
        members = Members[M](self)
        members[member.worker] = member
        members._tally = tally
        return members

    def without(self, worker: WorkerId) -> "Members[M]":
        """Return these without this one."""
        tally = self.tally.changed(self[worker], None)
        members = Members[M](self)
        del members[worker]
        members._tally = tally
        return members


class Seats(tuple[S, ...]):  # noqa: SLOT001 - a tuple of any length has no slots
    """One seat per rank, in order."""

    _tally: SeatTally | None = None

    @property
    def tally(self) -> SeatTally:
        """What is counted of them."""
        if self._tally is None:
            self._tally = _count_seats(self)
        return self._tally

    def having(self, seat: S) -> "Seats[S]":
        """Return these with this one, in the place of the one of its rank."""
        each = list(self)
        each[seat.rank] = seat
        seats = Seats(each)
        seats._tally = self.tally.changed(self[seat.rank], seat)
        return seats


def members_of(members: Mapping[WorkerId, M]) -> Members[M]:
    """Return the members as such that are counted."""
    return members if isinstance(members, Members) else Members(members)


def seats_of(seats: tuple[S, ...]) -> Seats[S]:
    """Return the seats as such that are counted."""
    return seats if isinstance(seats, Seats) else Seats(seats)


def _moved(
    phases: Mapping[MemberPhase, Mapping[WorkerId, float]], old: MemberLike | None, new: MemberLike | None
) -> Mapping[MemberPhase, Mapping[WorkerId, float]]:
    moved = dict(phases)
    if old is not None:
        left = dict(moved[old.phase])
        del left[old.worker]
        moved[old.phase] = left
        if not left:
            del moved[old.phase]
    if new is not None:
        moved[new.phase] = {**moved.get(new.phase, {}), new.worker: new.since}
    return moved


def _count_members(members: Iterable[MemberLike]) -> MemberTally:
    phases: dict[MemberPhase, dict[WorkerId, float]] = {}
    alive: dict[NodeId, int] = {}
    stepped = 0
    for member in members:
        phases.setdefault(member.phase, {})[member.worker] = member.since
        if member.phase not in LEAVING:
            alive[member.node] = alive.get(member.node, 0) + 1
        stepped += _has_stepped(member)
    return MemberTally(phases, alive, stepped)


def _count_seats(seats: Iterable[SeatLike]) -> SeatTally:
    each = list(seats)
    return SeatTally(
        vacant=frozenset(seat.rank for seat in each if _is_vacant(seat)),
        done=sum(seat.done for seat in each),
        unsealed=sum(not seat.sealed for seat in each),
        unknown=sum(seat.held is None for seat in each),
        homes=object(),
    )


def _is_vacant(seat: SeatLike) -> bool:
    return seat.owner is None and not seat.done


def _has_stepped(member: MemberLike | None) -> bool:
    return member is not None and member.rank is not None and member.stepped
