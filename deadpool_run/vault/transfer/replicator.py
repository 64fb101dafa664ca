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
from functools import partial
from typing import Any

from deadpool_run.core.copies.parity_groups import Group
from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.vault.transfer.catalog import Shared
from deadpool_run.vault.transfer.chunks import Hasher, SlotDigests
from deadpool_run.vault.transfer.decode import Others
from deadpool_run.vault.transfer.fetch import (
    FetchTask,
    OpenConnections,
    check_held,
    compute_snapshot,
    fetch_snapshot,
    fetch_transcript,
    is_held,
)
from deadpool_run.vault.transfer.framing import Bucket
from deadpool_run.vault.transfer.receiver import Served
from deadpool_run.vault.transfer.replicas import Memory, Replicas
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
Done = Callable[[str | None], None]
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
        digests, replicas = SlotDigests(hasher), Replicas(hasher, vault)
        self._shared = Shared(vault, streams, bucket, closing, hasher, digests, replicas, dial, here)
        self._vault = vault
        self._loop = loop
        self._on_safe, self._on_refused = on_safe, on_refused
        self._floor: Version | None = None
        self._local: dict[Rank, LocalVersions] = {}
        self._links: dict[Rank, dict[Peer, ReplicationLink]] = {}
        """Of each rank that lives here and whose buddies are known."""
        self._reported: dict[Rank, _Safe] = {}
        self._fetch_tasks: dict[Rank, FetchTask[Any]] = {}
        self._cancelled: dict[Rank, FetchTask[Any]] = {}  # the rank's next fetch waits for the end of this one
        self._served: list[Served] = []
        self._ending: list[ReplicationLink | FetchTask[Any]] = []
        self._fetched = (0, 0.0)

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
        return {*self._vault.ranks(), *self._fetch_tasks}

    def left(self, rank: Rank) -> None:
        """Note that the rank moved to another node: its memory here becomes a copy, which `keep` may drop."""
        self._cancel_fetch(rank)
        held = [] if rank not in self._local else self._local.pop(rank).held()
        self._end_links(rank)
        self._shared.slot_digests.forget(rank)
        segments = self._vault.take(rank)
        if segments is not None:
            self._shared.replicas.take_over(rank, self._shared.timeline.number, segments, held)

    def discard_above(self, timeline: int, version: Version) -> None:
        """Roll back: newer versions of older timelines are void. Snapshots are offered again in the new timeline."""
        self._floor = version
        for local in self._local.values():
            local.discard_above(version)
        self._shared.replicas.discard_above(timeline, version)
        self._begin(timeline)

    def renew(self, timeline: int) -> None:
        """Drop all copies, because the world starts again. The caller renews the vault and sets new buddies."""
        self._floor = None
        self._local.clear()
        for rank in list(self._fetch_tasks):
            self._cancel_fetch(rank)
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
        held = {*(each.version for each in self._local_of(rank).held()), *self._shared.replicas.parities.versions(rank)}
        return tuple(sorted(held)) if self._vault.has_transcript(rank) else ()

    def seat(self, rank: Rank, source: Peer | None, done: Done) -> None:
        """Prepare the rank's memory here for a replacement, then call `done` with the error, or None.

        Without a source, the memory comes from this node: the rank's own if it lived here last, else the copies. With a
        source, copies that were sent here are used too, in case the source is lost before it has sent more. Without such
        copies the slots stay empty, and the transcript is fetched. The descriptors are new, unless the rank lived here.
        """
        here = source is None and self._vault.has_transcript(rank)
        moved = not here and self._shared.replicas.move_to(self._vault, rank, left=source is None)
        if source is not None and not moved:
            self._seat_by_transcript(rank, source, done)
            return
        if (task := self._cancel_fetch(rank)) is not None:
            self._cancelled[rank] = task  # the rank's next one waits for its end
        if moved:
            here = True
            for held in self._vault.held(rank):
                self._local_of(rank).captured(held.version)
        why = None if here else f"this node holds no snapshot and transcript of rank {rank}"
        self._loop.call_soon(self._seated, rank, done, why)

    def fetch(self, rank: Rank, version: Version, source: Peer, done: Done) -> None:
        """Fetch this version into the rank's slots here, which then hold nothing else; call `done` as `seat` does."""
        stream_pool = self._shared.connections_to(source)
        act = partial(fetch_snapshot, self._shared, rank, version, self._shared.timeline.number, stream_pool)
        self._fill(rank, version, done, source=source, connections=stream_pool, act=act)

    def compute(self, rank: Rank, version: Version, done: Done) -> None:
        """Have this version in the rank's slots here, and call `done` as `seat` does; compute it if only a parity here has it.

        A fetch of an earlier order ends first: its thread may still write to a slot that the worker is about to use.
        """
        others, act = Others(self._shared), partial(check_held, self._vault, rank, version)
        if not is_held(self._vault, rank, version) and version in self._shared.replicas.parities.versions(rank):
            act = partial(compute_snapshot, self._shared, rank, version, self._shared.timeline.number, others)
        elif (task := self._fetch_tasks.get(rank) or self._cancelled.get(rank)) is None or not task.thread.is_alive():
            done(None)
            return
        self._fill(rank, version, done, source=self._shared.here, connections=others, act=act)

    def _fill(  # noqa: PLR0913 - what is filled, from where and how
        self,
        rank: Rank,
        version: Version,
        done: Done,
        *,
        source: Peer,
        connections: OpenConnections,
        act: Callable[[], int],
    ) -> None:
        began = time.monotonic()

        def end(nbytes: int | None, failure: str | None) -> None:
            if nbytes is not None and failure is None and self._fetch_tasks.get(rank) is fetch_task:
                self._fetched = (nbytes, time.monotonic() - began) if nbytes else self._fetched
                self._local_of(rank).captured(version)
            self._seated(rank, done, failure)

        fetch_task = self._fetch_tasks[rank] = FetchTask(
            name=f"fetch-{rank}",
            peer=source,
            connections=connections,
            act=act,
            on_end=partial(self._call, end),
            after=self._cancel_fetch(rank),
        )

    def fetch_transcript(self, rank: Rank, source: Peer, done: Callable[[Memory | None, str | None], None]) -> None:
        """Fetch the transcript of a rank that is not to live here; call `done` with memory that it owns, or with the error."""
        self._end_later(self._transcript_task(rank, source, done, after=None))

    def _transcript_task(
        self, rank: Rank, source: Peer, done: Callable[[Memory | None, str | None], None], after: FetchTask[Any] | None
    ) -> FetchTask[Memory]:
        def on_end(memory: Memory | None, failure: str | None) -> None:
            if not self._call(done, memory, failure) and memory is not None:
                memory.close()

        stream_pool = self._shared.connections_to(source)
        return FetchTask(
            name=f"transcript-{rank}",
            peer=source,
            connections=stream_pool,
            act=partial(fetch_transcript, self._shared, rank, self._shared.timeline.number, stream_pool),
            on_end=on_end,
            after=after,
        )

    def _seat_by_transcript(self, rank: Rank, source: Peer, done: Done) -> None:
        def end(memory: Memory | None, failure: str | None) -> None:
            if memory is not None and self._fetch_tasks.get(rank) is fetch_task:
                self._vault.put(rank, (), memory.give())
                self._shared.replicas.drop(rank)
            elif memory is not None:
                memory.close()
                failure = failure or "the fetch was cancelled"
            self._seated(rank, done, failure)

        fetch_task = self._fetch_tasks[rank] = self._transcript_task(rank, source, end, self._cancel_fetch(rank))

    def _cancel_fetch(self, rank: Rank) -> FetchTask[Any] | None:
        """Stop the rank's fetch; return what the rank's next one has to wait for."""
        fetch_task = self._fetch_tasks.pop(rank, None)
        if fetch_task is not None:
            self._end(fetch_task)
        return fetch_task or self._cancelled.pop(rank, None)

    def _seated(self, rank: Rank, done: Done, failure: str | None) -> None:
        if failure is None:
            self._wake(rank)
        done(failure)

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
        return self._shared.traffic(*self._fetched)

    def close(self) -> None:
        """End every thread and free all memory except the vault's. Blocks a short time; nothing is reported afterwards."""
        self._shared.closing.set()
        self._shared.striped_receives.close()
        running: list[ReplicationLink | FetchTask[Any] | Served] = [
            *self._ending,
            *self._fetch_tasks.values(),
            *self._served,
            *(link for links in self._links.values() for link in links.values()),
        ]
        for each in running:
            each.stop()
        deadline = time.monotonic() + _CLOSE_S
        for each in running:
            each.thread.join(max(0.0, deadline - time.monotonic()))
        self._shared.replicas.close()

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

    def _end(self, each: ReplicationLink | FetchTask[Any]) -> None:
        each.stop()
        self._end_later(each)

    def _end_later(self, each: ReplicationLink | FetchTask[Any]) -> None:
        """Have `close` wait for a thread that ends by itself."""
        self._ending = [*(other for other in self._ending if other.thread.is_alive()), each]
