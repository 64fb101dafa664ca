"""The replicator: the agent's interface to copies between the vaults of a job's nodes.

Its methods run in the event loop and never block. Threads read and write sockets, and report in the loop. A *timeline* lasts
from one rollback to the next. Its number grows, every delivery carries it, and deliveries of an older timeline are refused
once a newer one is known.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from deadpool_run.core.copies.parity_groups import Group
from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.vault.transfer.catalog import OwnSlots, Shared
from deadpool_run.vault.transfer.chunks import Hasher
from deadpool_run.vault.transfer.fetch import FetchTask
from deadpool_run.vault.transfer.fetches import Done, Fetches
from deadpool_run.vault.transfer.framing import Bucket
from deadpool_run.vault.transfer.memory import Memory
from deadpool_run.vault.transfer.receiver import Served
from deadpool_run.vault.transfer.replicas import Replicas
from deadpool_run.vault.transfer.sender import LocalVersions, ReplicationLink
from deadpool_run.vault.transfer.streams import Dial
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.peers import Peer, Traffic

MAX_SERVED = 1024
"""The maximum number of connections from peers."""
_CLOSE_S = 10.0

OnSafe = Callable[[Rank, tuple[Version, ...], bool, int], None]
OnRefused = Callable[[Rank, NodeId, bool], None]
_Safe = tuple[tuple[Version, ...], bool, int]


class Replicator:
    """Sends captures to buddies, holds copies for other nodes, and fetches the state of replacements.

    `dial` connects to a peer's vault, with authentication. It is called in threads, may block for a limited time (`close`
    waits for it), and raises OSError. `on_safe` is called in the loop, for a rank that lives here, with the versions that
    all its buddies hold complete, whether they hold its transcript, and the timeline; each time that these change. Without
    buddies, it gets the complete versions in the rank's own slots. `on_refused` is called in the loop when a buddy of a rank
    has had no memory for its copies for a while, and with False when it has taken one after that.
    """

    def __init__(  # noqa: PLR0913 - what it reads, calls and is limited by
        self,
        vault: Vault,
        loop: asyncio.AbstractEventLoop,
        dial: Dial,
        on_safe: OnSafe,
        on_refused: OnRefused,
        *,
        here: Peer,
        secret: bytes,
        bandwidth: int | None = None,
        streams: int = 1,
    ) -> None:
        """Start.

        `here` is where other nodes reach this one. `secret` is what all agents of the job know, and only they. `bandwidth` limits the bytes sent per second on all connections together; `streams` the connections for one large
        snapshot.
        """
        closing = threading.Event()
        bucket, hasher = Bucket(bandwidth, closing), Hasher(secret)
        slots, replicas = OwnSlots(hasher), Replicas(hasher, vault)
        self._shared = Shared(vault, streams, bucket, closing, hasher, slots, replicas, dial, here)
        self._vault, self._loop = vault, loop
        self._on_safe, self._on_refused = on_safe, on_refused
        self._floor: Version | None = None
        self._local: dict[Rank, LocalVersions] = {}
        self._links: dict[Rank, dict[Peer, ReplicationLink]] = {}
        """Of each rank that lives here and whose buddies are known."""
        self._reported: dict[Rank, _Safe] = {}
        self._fetches = Fetches(
            self._shared,
            loop,
            call=self._call,
            on_captured=lambda rank, version: self._local_of(rank).captured(version),
            on_seated=self._wake,
        )
        self._served: list[Served] = []
        self._ending: list[ReplicationLink] = []

    # --- buddies -------------------------------------------------------------------------------------------------

    def set_buddies(self, buddies: Mapping[Rank, tuple[Peer, ...]], groups: Collection[Group] = ()) -> None:
        """Copy only these ranks, which live here, to these peers from now on; of a rank in a group, they keep its parity."""
        grouped = {rank: group for group in groups for rank in group}
        for rank in self._links.keys() - buddies.keys():
            self._end_links(rank)
        for rank, peers in buddies.items():
            links = self._links.setdefault(rank, {})
            group = grouped.get(rank, ())
            for peer in [peer for peer, link in links.items() if peer not in peers or link.group != group]:
                self._end(links.pop(peer))
            for peer in peers:
                if peer not in links:
                    links[peer] = ReplicationLink(
                        rank=rank,
                        peer=peer,
                        local=self._local_of(rank),
                        group=group,
                        shared=self._shared,
                        on_change=lambda rank: self._call(self._report, rank),
                        on_refused=lambda rank, peer: self._call(self._report_refusal, rank, peer),
                    )
            self._report(rank)

    def keep(self, ranks: Collection[Rank], groups: Collection[Group] = ()) -> None:
        """Hold copies of only these ranks, of which this node is or was a buddy; of those in a group, the group's parity."""
        self._shared.replicas.keep(ranks, groups)

    # --- events on this node -------------------------------------------------------------------------------------

    def captured(self, rank: Rank, version: Version) -> None:
        """Note that the rank's worker has captured this version."""
        self._local_of(rank).captured(version)
        self._notify_captures()
        self._wake(rank)

    def skipped(self) -> None:
        """Note that a rank's worker skipped a capture; the rank's entry has the version."""
        self._notify_captures()

    def transcript_completed(self, rank: Rank) -> None:
        """Note that the rank's transcript is complete."""
        self._wake(rank)

    def local_ranks(self) -> set[Rank]:
        """Return the ranks that live here, or whose state is being fetched."""
        return {*self._vault.ranks(), *self._fetches.ranks()}

    def left(self, rank: Rank) -> None:
        """Note that the rank moved to another node: its memory here becomes a copy, which `keep` may drop."""
        self._fetches.cancel(rank)
        held = [] if rank not in self._local else self._local.pop(rank).held()
        self._end_links(rank)
        segments = self._vault.take(rank)
        self._shared.slots.forget(rank)
        if segments is not None:
            self._shared.replicas.take_over(rank, self._shared.timeline.number, segments, held)

    def discard_above(self, timeline: int, version: Version) -> None:
        """Roll back: newer versions of older timelines are void. Snapshots are offered again in the new timeline."""
        self._floor = version
        for local in self._local.values():
            local.discard_above(version)
        self._shared.replicas.discard_above(timeline, version)
        self._begin(timeline)
        self._fetches.resume_known(version)

    def committed(self, newest: Version | None, abandoned: Collection[int]) -> None:
        """Note the newest committed version, and versions that never will be."""
        self._shared.replicas.retention.committed(newest, abandoned)

    def renew(self, timeline: int) -> None:
        """Drop all copies, because the world starts again. The caller renews the vault and sets new buddies."""
        self._floor = None
        self._local.clear()
        self._shared.slots.clear()
        for rank in self._fetches.ranks():
            self._fetches.cancel(rank)
        for rank in list(self._links):
            self._end_links(rank)
        self._shared.replicas.renew(timeline)
        self._begin(timeline)

    # --- replacements -----------------------------------------------------------------------------------------------

    def ranks(self) -> tuple[Rank, ...]:
        """Return the ranks of which there is anything here: those that live here, and those with copies, or parts of them."""
        return tuple(sorted({*self._vault.ranks(), *self._shared.replicas.ranks()}))

    def versions(self, rank: Rank) -> tuple[Version, ...]:
        """Return, oldest first, the available versions of the rank; none without its transcript."""
        if not self._vault.lives_here(rank):
            return self._shared.replicas.versions(rank)
        held = {*(each.version for each in self._local_of(rank).held()), *self._shared.replicas.snapshots(rank)}
        return tuple(sorted(held)) if self._vault.has_transcript(rank) else ()

    def seat(self, rank: Rank, source: Peer | None, done: Done, *, resume: Version | None = None) -> None:
        """Prepare the rank's memory here for a replacement, then call `done` with the error, or None.

        Without a source, the memory comes from this node: the rank's own if it lived here last, else the copies. With a
        source, copies that were sent here are used too, in case the source is lost before it has sent more. Without such
        copies the slots stay empty, and the transcript is fetched. The descriptors are new, unless the rank lived here.

        `resume` is the version that the rank will be ordered to resume from, if it is known. Otherwise `discard_above` will
        say it. It is fetched from the source before the order, unless it is here.
        """
        self._fetches.seat(rank, source, resume, done)

    def fetch(self, rank: Rank, version: Version, source: Peer, done: Done) -> None:
        """Fetch this version into the rank's slots here, and call `done` as `seat` does."""
        self._fetches.fetch(rank, version, source, done)

    def compute(self, rank: Rank, version: Version, done: Done) -> None:
        """Have this version in the rank's slots here, and call `done` as `seat` does; only a copy or a parity here may have it.

        A fetch of an earlier order ends first: its thread may still write to a slot that the worker is about to use.
        """
        self._fetches.compute(rank, version, done)

    def fetch_transcript(self, rank: Rank, source: Peer, done: Callable[[Memory | None, str | None], None]) -> None:
        """Fetch the transcript of a rank that is not to live here; call `done` with memory that it owns, or with the error."""
        self._fetches.fetch_transcript(rank, source, done)

    # --- connections, status, close ------------------------------------------------------------------------------

    def serve(self, connection: PeerConnection) -> None:
        """Serve a peer that connected to this node, until it hangs up."""
        self._served = [each for each in self._served if each.thread.is_alive()]
        if self._shared.closing.is_set() or len(self._served) >= MAX_SERVED:
            connection.close()
            return
        self._served.append(Served(connection, self._shared))

    def report_all(self) -> None:
        """Report all ranks again, to a coordinator that does not know."""
        for rank, safe in self._reported.items():
            self._on_safe(rank, *safe)
        for rank, links in self._links.items():
            for peer, link in links.items():
                if link.refuses:
                    self._report_refusal(rank, peer)

    def is_refused(self, rank: Rank) -> bool:
        """Return whether a buddy of the rank has had no memory for its copies for a while."""
        return any(link.refuses for link in self._links.get(rank, {}).values())

    def traffic(self) -> Traffic:
        """Return what was copied between this node and others, and how fast."""
        return self._shared.traffic(*self._fetches.last)

    def close(self) -> None:
        """End every thread and free all memory except the vault's. Blocks a short time; nothing is reported afterwards."""
        self._shared.closing.set()
        self._shared.striped_receives.close()
        running: list[ReplicationLink | FetchTask[Any] | Served] = [
            *self._ending,
            *self._fetches.tasks(),
            *self._served,
            *(link for links in self._links.values() for link in links.values()),
        ]
        for each in running:
            each.stop()
        deadline = time.monotonic() + _CLOSE_S
        for each in running:
            each.thread.join(max(0.0, deadline - time.monotonic()))
        self._shared.replicas.close()
        self._shared.slots.clear()

    def _local_of(self, rank: Rank) -> LocalVersions:
        return self._local.setdefault(rank, LocalVersions(self._vault, rank, self._floor))

    def _begin(self, timeline: int) -> None:
        self._shared.timeline.begin(timeline)
        for rank in self._links.keys() | self._local.keys():
            self._wake(rank)

    def _notify_captures(self) -> None:
        with self._shared.captures:
            self._shared.captures.notify_all()

    def _wake(self, rank: Rank) -> None:
        for link in self._links.get(rank, {}).values():
            link.wake()
        self._report(rank)

    def _report(self, rank: Rank) -> None:
        """Report what is safe, if it has changed; nothing before the rank's buddies are known."""
        links = self._links.get(rank)
        if links is None or self._shared.closing.is_set():
            return
        timeline = self._shared.timeline.number
        if links:
            holdings = [link.safe(timeline) for link in links.values()]
            common = frozenset.intersection(*(held for held, _ in holdings))
            versions = tuple(sorted(version for version, _ in common))
            safe = (versions, all(transcript for _, transcript in holdings), timeline)
        else:
            held = tuple(each.version for each in self._local_of(rank).held())
            safe = (held, self._vault.has_transcript(rank), timeline)
        if self._reported.get(rank) != safe:
            self._reported[rank] = safe
            self._on_safe(rank, *safe)

    def _report_refusal(self, rank: Rank, peer: Peer) -> None:
        if (link := self._links.get(rank, {}).get(peer)) is not None:
            self._on_refused(rank, peer.node, link.refuses)

    def _call(self, what: Callable[..., None], *arguments: object) -> bool:
        """Call a function in the loop; False if the loop is closed."""
        with contextlib.suppress(RuntimeError):  # the loop was closed
            if not self._shared.closing.is_set():
                self._loop.call_soon_threadsafe(what, *arguments)
                return True
        return False

    def _end_links(self, rank: Rank) -> None:
        self._reported.pop(rank, None)
        for link in self._links.pop(rank, {}).values():
            self._end(link)

    def _end(self, link: ReplicationLink) -> None:
        """Stop a link. `close` waits for its thread, which ends by itself."""
        link.stop()
        self._ending = [*(other for other in self._ending if other.thread.is_alive()), link]
