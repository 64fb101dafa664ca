"""What a node needs of replication between nodes. `vault.transfer.replicator.Replicator` implements it."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from deadpool_run.ids import Rank, Version
from deadpool_run.wire.peers import Peer

Done = Callable[[str | None], None]
"""Called in the loop: with None when it is done, else with the reason why it failed."""


class Copies(Protocol):
    """Nothing here blocks."""

    def set_buddies(self, buddies: Mapping[Rank, tuple[Peer, ...]]) -> None:
        """Send copies of the ranks that live here to these nodes from now on."""

    def keep(self, ranks: Collection[Rank]) -> None:
        """Hold copies of these ranks only."""

    def captured(self, rank: Rank, version: Version) -> None:
        """Send a snapshot that a worker here has just completed."""

    def skipped(self) -> None:
        """Handle a snapshot that a worker here skipped; its rank entry on the status page says which."""

    def sealed(self, rank: Rank) -> None:
        """Send a transcript that a worker here has just completed."""

    def local_ranks(self) -> set[Rank]:
        """Return the ranks that live here, also those of replacements that have not started."""

    def left(self, rank: Rank) -> None:
        """Handle that the rank lives on another node now."""

    def discard_above(self, timeline: int, version: Version) -> None:
        """Forget versions above this one of older timelines."""

    def renew(self, timeline: int) -> None:
        """Forget everything: the world starts again."""

    def versions(self, rank: Rank) -> tuple[Version, ...]:
        """Return the versions that are complete here, with the transcript."""

    def seat(self, rank: Rank, source: Peer | None, done: Done) -> None:
        """Prepare the rank's memory for a replacement, and fetch its transcript from the source."""

    def fetch(self, rank: Rank, version: Version, source: Peer, done: Done) -> None:
        """Fetch a snapshot into the rank's memory here."""

    def report_all(self) -> None:
        """Report again what is safe, for a new leader."""

    def status(self) -> dict[str, Any]:
        """Return the counters for `status`."""

    def close(self) -> None:
        """Free everything."""
