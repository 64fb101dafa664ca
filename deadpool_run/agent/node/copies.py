"""What a node's workers need of the copies that nodes keep for each other. `vault.replication.Replicator` is it."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from deadpool_run.ids import Rank, Version
from deadpool_run.wire.peers import Peer

Done = Callable[[str | None], None]
"""Told, in the loop, that something was done, or why it was not."""


class Copies(Protocol):
    """Nothing here blocks."""

    def set_buddies(self, buddies: Mapping[Rank, tuple[Peer, ...]]) -> None:
        """Send what the ranks that live here have to these from now on."""

    def keep(self, ranks: Collection[Rank]) -> None:
        """Hold copies for these ranks alone."""

    def captured(self, rank: Rank, version: Version) -> None:
        """Send a snapshot that a worker here has just completed."""

    def skipped(self) -> None:
        """Note that a worker here has not completed a snapshot; its rank entry on the status page says which."""

    def sealed(self, rank: Rank) -> None:
        """Send a transcript that a worker here has just completed."""

    def local_ranks(self) -> set[Rank]:
        """Return the ranks that live here, or whose state is being fetched."""

    def left(self, rank: Rank) -> None:
        """Note that the rank lives elsewhere now."""

    def discard_above(self, timeline: int, version: Version) -> None:
        """Drop newer versions of older timelines."""

    def renew(self, timeline: int) -> None:
        """Forget everything: the world begins from the top."""

    def versions(self, rank: Rank) -> tuple[Version, ...]:
        """Return what is complete here, the transcript included."""

    def seat(self, rank: Rank, source: Peer | None, done: Done) -> None:
        """Prepare the rank's memory for a replacement, its transcript brought from the source."""

    def fetch(self, rank: Rank, version: Version, source: Peer, done: Done) -> None:
        """Bring a snapshot into the rank's memory here."""

    def report_all(self) -> None:
        """Report all ranks again, to a coordinator that does not know."""

    def status(self) -> dict[str, Any]:
        """Return what there is to see of it."""

    def close(self) -> None:
        """Let go of everything."""
