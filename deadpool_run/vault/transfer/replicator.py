"""Copies between the vaults of a job's nodes: the one door to it, for the agent.

The methods are the loop's and none blocks; all that reads or writes sockets runs in threads, and what they find out is
told in the loop. A *life* is what goes on between roll-backs: each has a larger number than the last, everything sent
carries it, and what an older life sends is refused once a newer one is known.
"""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.vault.transfer import fetch as fetching
from deadpool_run.vault.transfer.catalog import Captures, Shared, Timeline
from deadpool_run.vault.transfer.fetch import FetchTask
from deadpool_run.vault.transfer.framing import Bucket, Meter
from deadpool_run.vault.transfer.receiver import Served
from deadpool_run.vault.transfer.replicas import Memory, Replicas
from deadpool_run.vault.transfer.sender import Dial, LocalVersions, ReplicationLink
from deadpool_run.vault.transfer.streams import StreamPool, StripedReceives
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.peers import Peer

__all__ = ["OnSafe", "Peer", "Replicator"]

MAX_SERVED = 1024
"""Connections of peers at a time: eight ranks of a thousand nodes could not all ask one node for what it holds."""
_CLOSE_S = 10.0

OnSafe = Callable[[Rank, tuple[Version, ...], bool, int], None]
Done = Callable[[str | None], None]
_Safe = tuple[tuple[Version, ...], bool, int]


class Replicator:
    """Sends what is captured here to buddies, holds copies for others, and brings replacements their state.

    `dial` connects to a peer's vault, authenticated; it is called in threads, blocks, must end by itself (close waits
    for it, a while) and raises OSError. `on_safe` is told, in the loop, the versions that all buddies of a rank that
    lives here hold complete, and whether they hold its transcript, in which life; each time that changes. Of a rank that
    has no buddies, it is what its own slots hold.
    """

    def __init__(  # noqa: PLR0913 - what it reads, whom it reaches and tells, and under which bounds
        self,
        vault: Vault,
        loop: asyncio.AbstractEventLoop,
        dial: Dial,
        on_safe: OnSafe,
        *,
        bandwidth: int | None = None,
        streams: int = 1,
    ) -> None:
        """Begin.

        `bandwidth` bounds the bytes a second that are sent, on all connections together; `streams` the connections that
        one large snapshot is sent over, or fetched.
        """
        closing = threading.Event()
        self._shared = Shared(
            vault=vault,
            replicas=Replicas(),
            timeline=Timeline(),
            captures=Captures(),
            striped_receives=StripedReceives(),
            streams=streams,
            bucket=Bucket(bandwidth, closing),
            sent=Meter(),
            received=Meter(),
            spared=Meter(),
            closing=closing,
        )
        self._vault = vault
        self._loop = loop
        self._dial = dial
        self._on_safe = on_safe
        self._floor: Version | None = None
        self._homes: dict[Rank, LocalVersions] = {}
        self._links: dict[Rank, dict[NodeId, ReplicationLink]] = {}
        self._peers: dict[Rank, tuple[Peer, ...]] = {}
        self._told: dict[Rank, _Safe] = {}
        self._errands: dict[Rank, FetchTask] = {}
        self._served: list[Served] = []
        self._ending: list[ReplicationLink | FetchTask] = []
        self._fetched = (0, 0.0)

    # --- who holds whose copies ----------------------------------------------------------------------------------

    def set_buddies(self, buddies: Mapping[Rank, tuple[Peer, ...]]) -> None:
        """Copy each of these ranks, which live here, to these peers from now on; no other rank to anyone."""
        for rank in self._peers.keys() - buddies.keys():
            self._told.pop(rank, None)
            for link in self._links.pop(rank, {}).values():
                self._end(link)
        before, self._peers = self._peers, dict(buddies)
        for rank, peers in buddies.items():
            links = self._links.setdefault(rank, {})
            kept = {peer.node for peer in peers if peer in before.get(rank, ())}
            for node in links.keys() - kept:
                self._end(links.pop(node))
            for peer in peers:
                if peer.node not in links:
                    links[peer.node] = ReplicationLink(
                        rank=rank,
                        peer=peer,
                        home=self._home(rank),
                        shared=self._shared,
                        dial=self._dial,
                        on_change=self._in_loop,
                    )
            self._tell(rank)

    def keep(self, ranks: Collection[Rank]) -> None:
        """Hold copies of these ranks, whose present or former buddy this node is, and of no others."""
        self._shared.replicas.keep(ranks)

    # --- what happens here ---------------------------------------------------------------------------------------

    def captured(self, rank: Rank, version: Version) -> None:
        """Note that the rank's worker holds this version complete."""
        self._home(rank).captured(version)
        self._shared.captures.tell()
        self._wake(rank)

    def skipped(self) -> None:
        """Note that a rank's worker will not hold a version that it was to capture; its rank entry says which."""
        self._shared.captures.tell()

    def sealed(self, rank: Rank) -> None:
        """Note that the rank's transcript is complete."""
        self._wake(rank)

    def at_home(self) -> set[Rank]:
        """Return the ranks that live here, or that replacements here were to have."""
        ranks = map(Rank, range(self._vault.world_size))
        return {*filter(self._vault.lives_here, ranks), *self._errands}

    def left(self, rank: Rank) -> None:
        """Note that the rank lives elsewhere now: what it leaves here is a copy like others, which `keep` may drop."""
        self._give_up_fetch_task(rank)
        held = [] if rank not in self._homes else self._homes.pop(rank).held()
        for link in self._links.pop(rank, {}).values():
            self._end(link)
        self._peers.pop(rank, None)
        self._told.pop(rank, None)
        segments = self._vault.take(rank)
        if segments is not None:
            self._shared.replicas.take_over(rank, self._shared.timeline.number, segments, held)

    def discard_above(self, timeline: int, version: Version) -> None:
        """All go on from this version: newer ones of older lives are void. What is held is sent again, as of this life."""
        self._floor = version
        for home in self._homes.values():
            home.discard_above(version)
        self._shared.replicas.discard_above(timeline, version)
        self._begin(timeline)

    def renew(self, timeline: int) -> None:
        """Forget all copies: the world begins from the top. The vault is renewed beside it; buddies are set anew."""
        self._floor = None
        self._homes.clear()
        for fetch_task in self._errands.values():
            self._end(fetch_task)
        self._errands.clear()
        for links in self._links.values():
            for link in links.values():
                self._end(link)
        self._links.clear()
        self._peers.clear()
        self._told.clear()
        self._shared.replicas.renew(timeline)
        self._begin(timeline)

    # --- replacements -----------------------------------------------------------------------------------------------

    def versions(self, rank: Rank) -> tuple[Version, ...]:
        """Return, oldest first, what can be had of the rank here; nothing without its transcript."""
        if not self._vault.lives_here(rank):
            return self._shared.replicas.versions(rank)
        return () if not self._vault.has_transcript(rank) else tuple(held.version for held in self._home(rank).held())

    def seat(self, rank: Rank, source: Peer | None, done: Done) -> None:
        """Prepare the rank's memory here for a replacement, and say `done`, with what went wrong if anything did.

        Without a source, what lies here counts: the rank's own memory if it lived here last, else the copies. With one,
        copies that were sent here count too: they are what is left if the source is lost before it has sent more. Else the
        slots are empty and the transcript comes from there. Its descriptors are new ones, unless it lived here.
        """
        here = source is None and self._vault.has_transcript(rank)
        moved = not here and self._shared.replicas.move_to(self._vault, rank, left=source is None)
        if source is not None and not moved:
            self._errands[rank] = self._bring_transcript(rank, source, done)
            return
        self._give_up_fetch_task(rank)
        if moved:
            here = True
            for held in self._vault.held(rank):
                self._home(rank).captured(held.version)
        why = None if here else f"nothing of rank {rank} to begin with lies here"
        self._loop.call_soon(self._seated, rank, done, why)

    def fetch(self, rank: Rank, version: Version, source: Peer, done: Done) -> None:
        """Bring this version to the rank's slots here, which hold nothing else then, and say `done` as `seat` does."""
        timeline = self._shared.timeline.number
        began = time.monotonic()
        nbytes = 0

        def act(sock: socket.socket, stream_pool: StreamPool) -> None:
            nonlocal nbytes
            nbytes = fetching.bring_snapshot(sock, stream_pool, self._shared, rank, version, timeline)

        def end(failure: str | None) -> None:
            if failure is None:
                self._fetched = (nbytes, time.monotonic() - began)
                self._home(rank).captured(version)
            self._seated(rank, done, failure)

        self._errands[rank] = FetchTask(
            name=f"fetch-{rank}",
            peer=source,
            dial=self._dial,
            act=act,
            on_end=lambda why: self._call(end, why),
            after=self._give_up_fetch_task(rank),
        )

    def _bring_transcript(self, rank: Rank, source: Peer, done: Done) -> FetchTask:
        brought: list[Memory] = []
        timeline = self._shared.timeline.number

        def act(sock: socket.socket, _: StreamPool) -> None:
            brought.append(fetching.bring_transcript(sock, self._shared, rank, timeline))

        def end(failure: str | None) -> None:
            if brought and self._errands.get(rank) is fetch_task:
                self._vault.put(rank, (None, None), brought.pop().give())
                self._shared.replicas.drop(rank)
            elif brought:
                brought.pop().close()
                failure = failure or "no longer wanted"
            self._seated(rank, done, failure)

        def on_end(why: str | None) -> None:
            if not self._call(end, why) and brought:
                brought.pop().close()

        fetch_task = FetchTask(
            name=f"seat-{rank}",
            peer=source,
            dial=self._dial,
            act=act,
            on_end=on_end,
            after=self._give_up_fetch_task(rank),
        )
        return fetch_task

    def _give_up_fetch_task(self, rank: Rank) -> FetchTask | None:
        fetch_task = self._errands.pop(rank, None)
        if fetch_task is not None:
            self._end(fetch_task)
        return fetch_task

    def _seated(self, rank: Rank, done: Done, failure: str | None) -> None:
        if failure is None:
            self._wake(rank)
        done(failure)

    # --- connections, the view, the end --------------------------------------------------------------------------

    def serve(self, sock: socket.socket) -> None:
        """Serve a peer that has connected to this node, until it hangs up."""
        self._served = [each for each in self._served if each.thread.is_alive()]
        if self._shared.closing.is_set() or len(self._served) >= MAX_SERVED:
            sock.close()
            return
        self._served.append(Served(sock, self._shared))

    def tell_all(self) -> None:
        """Say again what is safe, of every rank: to a coordinator that has not heard it."""
        for rank, safe in self._told.items():
            self._on_safe(rank, *safe)

    def report(self) -> dict[str, Any]:
        """Return what a status shows: bytes, bytes a second, and how far the buddies of each rank are behind."""
        shared = self._shared
        ranks = {}
        for rank, (safe, transcript, _) in sorted(self._told.items()):
            held = [each.version for each in self._home(rank).held()]
            newest, newest_safe = max(held, default=None), max(safe, default=None)
            lag = None if newest is None or newest_safe is None else max(0, newest - newest_safe)
            ranks[rank] = {"newest": newest, "safe": newest_safe, "transcript": transcript, "lag": lag}
        return {
            "sent_bytes": shared.sent.total,
            "received_bytes": shared.received.total,
            "spared_bytes": shared.spared.total,
            "sent_bytes_per_s": shared.sent.rate(),
            "received_bytes_per_s": shared.received.rate(),
            "fetched_bytes": self._fetched[0],
            "fetched_s": self._fetched[1],
            "ranks": ranks,
            "copies": {rank: list(versions) for rank, versions in shared.replicas.ranks().items()},
        }

    def close(self) -> None:
        """End every thread and let go of all memory but the vault's. Blocks, a short while; nothing is told after."""
        self._shared.closing.set()
        self._shared.striped_receives.close()
        running: list[ReplicationLink | FetchTask | Served] = [*self._ending, *self._errands.values(), *self._served]
        running += [link for links in self._links.values() for link in links.values()]
        for each in running:
            each.stop()
        deadline = time.monotonic() + _CLOSE_S
        for each in running:
            each.thread.join(max(0.0, deadline - time.monotonic()))
        self._shared.replicas.close()

    def _home(self, rank: Rank) -> LocalVersions:
        return self._homes.setdefault(rank, LocalVersions(self._vault, rank, self._floor))

    def _begin(self, timeline: int) -> None:
        """Begin a life: nothing is safe in it yet."""
        self._shared.timeline.begin(timeline)
        for rank in self._peers.keys() | self._homes.keys():
            self._wake(rank)

    def _wake(self, rank: Rank) -> None:
        for link in self._links.get(rank, {}).values():
            link.wake()
        self._tell(rank)

    def _tell(self, rank: Rank) -> None:
        """Say what is safe of the rank, if that is not what was said last; nothing before it is known who its buddies are."""
        if rank not in self._peers or self._shared.closing.is_set():
            return
        timeline, links = self._shared.timeline.number, self._links.get(rank, {})
        if links:
            told = [link.safe(timeline) for link in links.values()]
            common = frozenset.intersection(*(held for held, _ in told))
            safe = (
                tuple(sorted(version for version, _ in common)),
                all(transcript for _, transcript in told),
                timeline,
            )
        else:
            held = tuple(each.version for each in self._home(rank).held())
            safe = (held, self._vault.has_transcript(rank), timeline)
        if self._told.get(rank) != safe:
            self._told[rank] = safe
            self._on_safe(rank, *safe)

    def _in_loop(self, rank: Rank) -> None:
        """Note, on a link's thread, that its buddy holds something else than before."""
        self._call(self._tell, rank)

    def _call(self, what: Callable[..., None], *arguments: object) -> bool:
        """Have the loop call it; False if the loop is over."""
        if self._shared.closing.is_set():
            return False
        with contextlib.suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(what, *arguments)
            return True
        return False

    def _end(self, each: ReplicationLink | FetchTask) -> None:
        """Have a thread end; it is waited for in the end."""
        each.stop()
        self._ending = [other for other in self._ending if other.thread.is_alive()]
        self._ending.append(each)
