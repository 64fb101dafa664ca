"""The versions that ranks can be restored to, and the choice of the one to resume from."""

from collections.abc import Iterable, Sequence

from deadpool_run.core.events import SurvivorDrained, WorkerExited
from deadpool_run.core.members import Seat
from deadpool_run.ids import Version


def held_by_survivor(drained: SurvivorDrained) -> frozenset[Version]:
    """Return what a survivor's rank holds: the versions in its slots, and that of its objects."""
    return frozenset(drained.captured) if drained.live is None else frozenset({*drained.captured, drained.live})


def held_after_death(exited: WorkerExited) -> frozenset[Version]:
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
