"""Members and seats that know how many of them are how. Pure.

They stand on shelves, so that a word of one member costs no copy of all, and what is asked after every word is counted on.
Any other mapping or sequence will do in a state as well (one that was read from JSON, or made by a test): it is counted
when it is asked.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from deadpool_run.core.shelves import Shelves
from deadpool_run.core.tallies import MemberLike, MemberTally, SeatLike, SeatTally, count_members, count_seats
from deadpool_run.ids import Rank, WorkerId

_FEW = 8
"""Changes of fewer than one in so many are counted one by one; else all is counted anew."""

M = TypeVar("M", bound=MemberLike)
S = TypeVar("S", bound=SeatLike)


class Members(Shelves[WorkerId, M]):
    """Members by number. Never changed in place."""

    __slots__ = ("_tally",)
    _tally: MemberTally | None

    def __init__(self, members: Any = ()) -> None:
        super().__init__(members)
        self._tally = None

    @property
    def tally(self) -> MemberTally:
        """What is counted of them."""
        if self._tally is None:
            self._tally = count_members(self.values())
        return self._tally

    def having(self, worker: WorkerId, member: M) -> "Members[M]":
        """Return these with this one, in the place of the one with its number."""
        members = super().having(worker, member)
        members._tally = self.tally.changed(self.get(worker), member)  # noqa: SLF001 - one of us
        return members

    def having_all(self, changes: Mapping[WorkerId, M]) -> "Members[M]":
        """Return these with all of those."""
        members = super().having_all(changes)
        members._tally = None  # noqa: SLF001 - one of us
        if len(changes) * _FEW < len(self):
            tally = self.tally
            for worker, member in changes.items():
                tally = tally.changed(self.get(worker), member)
            members._tally = tally  # noqa: SLF001 - one of us
        return members

    def without(self, worker: WorkerId) -> "Members[M]":
        """Return these without this one."""
        members = super().without(worker)
        members._tally = self.tally.changed(self[worker], None)  # noqa: SLF001 - one of us
        return members


class Seats(Sequence[S]):
    """One seat per rank, in order. Never changed in place."""

    __slots__ = ("_by_rank", "_tally")

    def __init__(self, seats: Iterable[S] = ()) -> None:
        self._by_rank: Shelves[Rank, S] = Shelves((seat.rank, seat) for seat in seats)
        self._tally: SeatTally | None = None

    @overload
    def __getitem__(self, rank: int) -> S: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[S]: ...
    def __getitem__(self, rank: int | slice) -> S | Sequence[S]:
        try:
            return self._by_rank[rank]  # type: ignore[index]
        except KeyError:
            raise IndexError(rank) from None
        except TypeError:
            return tuple(self)[rank]

    def __iter__(self) -> Iterator[S]:
        return iter(self._by_rank.values())

    def __len__(self) -> int:
        return len(self._by_rank)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Seats({list(self)})"

    @property
    def tally(self) -> SeatTally:
        """What is counted of them."""
        if self._tally is None:
            self._tally = count_seats(self)
        return self._tally

    def having(self, seat: S) -> "Seats[S]":
        """Return these with this one, in the place of the one of its rank."""
        seats = self._made(self._by_rank.having(seat.rank, seat))
        seats._tally = self.tally.changed(self[seat.rank], seat)  # noqa: SLF001 - one of us
        return seats

    def having_all(self, changes: Mapping[Rank, S]) -> "Seats[S]":
        """Return these with all of those."""
        seats = self._made(self._by_rank.having_all(changes))
        if len(changes) * _FEW < len(self):
            tally = self.tally
            for rank, seat in changes.items():
                tally = tally.changed(self[rank], seat)
            seats._tally = tally  # noqa: SLF001 - one of us
        return seats

    @staticmethod
    def _made(by_rank: Shelves[Rank, S]) -> "Seats[S]":
        seats = Seats[S]()
        seats._by_rank = by_rank
        return seats


def members_of(members: Mapping[WorkerId, M]) -> Members[M]:
    """Return the members as such that are counted."""
    return members if isinstance(members, Members) else Members(members)


def seats_of(seats: Sequence[S]) -> Seats[S]:
    """Return the seats as such that are counted."""
    return seats if isinstance(seats, Seats) else Seats(seats)
