"""How many members and seats are how, counted on from one state to the next. Pure.

A world has tens of thousands of members, and each of them says something at each change of the world: no word may cost a
look at all of them. So what is asked after every word is known; see `rows` for who keeps it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from deadpool_run.core.shelves import ByNode, Shelves, Times
from deadpool_run.core.transitions import TIMED, MemberPhase
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
    def ending_grace_s(self) -> float: ...  # noqa: D102 - as the classes have it
    @property
    def rank(self) -> Rank | None: ...  # noqa: D102 - as the classes have it
    @property
    def claimed(self) -> Rank | None: ...  # noqa: D102 - as the classes have it
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
    @property
    def copies(self) -> Mapping[NodeId, frozenset[Version]]: ...  # noqa: D102 - as the classes have it
    @property
    def asked(self) -> frozenset[NodeId]: ...  # noqa: D102 - as the classes have it


@dataclass(frozen=True, slots=True)
class Crowd:
    """The members of one phase. Never changed in place, nor is anything in it."""

    who: Shelves[WorkerId, None] = field(default_factory=Shelves)
    times: Times = field(default_factory=Times)
    """From when on it is waited for each of them, where that ends some time: else nothing."""

    def having(self, member: MemberLike) -> "Crowd":
        """Return these with one more."""
        times = self.times.one_more(patience_from(member)) if member.phase in TIMED else self.times
        return Crowd(self.who.having(member.worker, None), times)

    def without(self, member: MemberLike) -> "Crowd":
        """Return these without this one, as it was."""
        times = self.times.one_less(patience_from(member)) if member.phase in TIMED else self.times
        return Crowd(self.who.without(member.worker), times)


_NOBODY = Crowd()


@dataclass(frozen=True, slots=True)
class MemberTally:
    """Never changed in place, nor is anything in it. What has not changed is the same object as before."""

    phases: Mapping[MemberPhase, Crowd]
    """Who is in which phase; phases that nobody is in are left out."""
    on: ByNode[frozenset[WorkerId]]
    """Who is on which node; nodes without members are left out."""
    alive: ByNode[int]
    """Members that are not about to leave, by node; nodes without any are left out."""
    stepped: int
    """Members that hold a rank and have completed a step since they attached."""
    bound: int
    """Members that hold a rank, or that one of them waits for."""
    claiming: int
    """Members that a rank waits for."""

    def changed(self, old: MemberLike | None, new: MemberLike | None) -> "MemberTally":
        """Return the tally after one member became another: None is one that is not there."""
        phases, on, alive = self.phases, self.on, self.alive
        if old is None or new is None or old.phase is not new.phase:
            phases = _moved(phases, old, new)
        elif new.phase in TIMED and patience_from(old) != patience_from(new):
            crowd = phases[new.phase]
            times = crowd.times.one_less(patience_from(old)).one_more(patience_from(new))
            phases = {**phases, new.phase: Crowd(crowd.who, times)}
        was_at, is_at = None if old is None else old.node, None if new is None else new.node
        if was_at != is_at:
            on = _resettled(on, old, new)
        was_alive_at = None if old is None or old.phase in LEAVING else was_at
        is_alive_at = None if new is None or new.phase in LEAVING else is_at
        if was_alive_at != is_alive_at:
            alive = _counted(_counted(alive, was_alive_at, -1), is_alive_at, 1)
        return MemberTally(
            phases,
            on,
            alive,
            self.stepped + _has_stepped(new) - _has_stepped(old),
            self.bound + _is_bound(new) - _is_bound(old),
            self.claiming + _claims(new) - _claims(old),
        )


@dataclass(frozen=True, slots=True)
class SeatTally:
    """Never changed in place, nor is anything in it. What has not changed is the same object as before."""

    vacant: Shelves[Rank, None]
    """Those that need a worker."""
    sought: Shelves[Rank, tuple[Mapping[NodeId, frozenset[Version]], frozenset[NodeId]]]
    """Those of which it is known who has copies, or of which somebody is asked."""
    homes: ByNode[frozenset[Rank]]
    """Which are on which node; nodes without any are left out."""
    done: int
    unsealed: int
    unknown: int
    """Those of which it is not known what they hold."""

    def changed(self, old: SeatLike, new: SeatLike) -> "SeatTally":
        """Return the tally after one seat became another."""
        vacant, sought, homes = self.vacant, self.sought, self.homes
        if (is_vacant := _is_vacant(new)) != _is_vacant(old):
            vacant = vacant.having(new.rank, None) if is_vacant else vacant.without(new.rank)
        if old.copies is not new.copies or old.asked is not new.asked:
            sought = _sought(sought, old, new)
        if old.node != new.node:
            homes = _moved_in(_moved_out(homes, old), new)
        return SeatTally(
            vacant,
            sought,
            homes,
            self.done + new.done - old.done,
            self.unsealed + old.sealed - new.sealed,
            self.unknown + (new.held is None) - (old.held is None),
        )


def patience_from(member: MemberLike) -> float:
    """Return from when on it is waited for the member: whoever is ended is given its grace first."""
    return member.since + member.ending_grace_s


def _moved(
    phases: Mapping[MemberPhase, Crowd], old: MemberLike | None, new: MemberLike | None
) -> Mapping[MemberPhase, Crowd]:
    moved = dict(phases)
    if old is not None:
        left = moved[old.phase].without(old)
        moved[old.phase] = left
        if not left.who:
            del moved[old.phase]
    if new is not None:
        moved[new.phase] = moved.get(new.phase, _NOBODY).having(new)
    return moved


def _resettled(
    on: ByNode[frozenset[WorkerId]], old: MemberLike | None, new: MemberLike | None
) -> ByNode[frozenset[WorkerId]]:
    if old is not None:
        left = on[old.node] - {old.worker}
        on = on.having(old.node, left) if left else on.without(old.node)
    if new is not None:
        on = on.having(new.node, on.get(new.node, frozenset()) | {new.worker})
    return on


def _counted(counts: ByNode[int], node: NodeId | None, step: int) -> ByNode[int]:
    if node is None:
        return counts
    count = counts.get(node, 0) + step
    return counts.having(node, count) if count else counts.without(node)


def _sought(sought: Any, old: SeatLike, new: SeatLike) -> Any:
    if new.copies or new.asked:
        return sought.having(new.rank, (new.copies, new.asked))
    return sought.without(new.rank) if old.copies or old.asked else sought


def _moved_out(homes: ByNode[frozenset[Rank]], seat: SeatLike) -> ByNode[frozenset[Rank]]:
    if seat.node is None:
        return homes
    left = homes[seat.node] - {seat.rank}
    return homes.having(seat.node, left) if left else homes.without(seat.node)


def _moved_in(homes: ByNode[frozenset[Rank]], seat: SeatLike) -> ByNode[frozenset[Rank]]:
    if seat.node is None:
        return homes
    return homes.having(seat.node, homes.get(seat.node, frozenset()) | {seat.rank})


def count_members(members: Iterable[MemberLike]) -> MemberTally:
    """Return the tally of these members, counted anew."""
    phases: dict[MemberPhase, dict[WorkerId, float]] = {}
    on: dict[NodeId, set[WorkerId]] = {}
    alive: dict[NodeId, int] = {}
    stepped = bound = claiming = 0
    for member in members:
        phases.setdefault(member.phase, {})[member.worker] = patience_from(member)
        on.setdefault(member.node, set()).add(member.worker)
        if member.phase not in LEAVING:
            alive[member.node] = alive.get(member.node, 0) + 1
        stepped += _has_stepped(member)
        bound += _is_bound(member)
        claiming += _claims(member)
    crowds = {phase: _crowd(phase, who) for phase, who in phases.items()}
    settled = ByNode({node: frozenset(workers) for node, workers in on.items()})
    return MemberTally(crowds, settled, ByNode(alive), stepped, bound, claiming)


def _crowd(phase: MemberPhase, who: Mapping[WorkerId, float]) -> Crowd:
    times = _how_many(who.values()) if phase in TIMED else {}
    return Crowd(Shelves(dict.fromkeys(who)), Times(times))


def _how_many(times: Iterable[float]) -> dict[float, int]:
    counts: dict[float, int] = {}
    for at in times:
        counts[at] = counts.get(at, 0) + 1
    return counts


def count_seats(seats: Iterable[SeatLike]) -> SeatTally:
    """Return the tally of these seats, counted anew."""
    each = list(seats)
    homes: dict[NodeId, set[Rank]] = {}
    for seat in each:
        if seat.node is not None:
            homes.setdefault(seat.node, set()).add(seat.rank)
    return SeatTally(
        vacant=Shelves((seat.rank, None) for seat in each if _is_vacant(seat)),
        sought=Shelves((seat.rank, (seat.copies, seat.asked)) for seat in each if seat.copies or seat.asked),
        homes=ByNode({node: frozenset(ranks) for node, ranks in homes.items()}),
        done=sum(seat.done for seat in each),
        unsealed=sum(not seat.sealed for seat in each),
        unknown=sum(seat.held is None for seat in each),
    )


def _is_vacant(seat: SeatLike) -> bool:
    return seat.owner is None and not seat.done


def _has_stepped(member: MemberLike | None) -> bool:
    return member is not None and member.rank is not None and member.stepped


def _is_bound(member: MemberLike | None) -> bool:
    return member is not None and (member.rank is not None or member.claimed is not None)


def _claims(member: MemberLike | None) -> bool:
    return member is not None and member.claimed is not None
