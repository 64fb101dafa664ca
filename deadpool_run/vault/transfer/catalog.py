"""Finds the snapshots and transcripts of this node that can be sent, and checks those that arrived."""

import contextlib
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from deadpool_run.errors import SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.transfer.chunks import ChunkDigests, Hasher, SlotDigests
from deadpool_run.vault.transfer.framing import Bucket, Meter
from deadpool_run.vault.transfer.replicas import TRANSCRIPT, Replicas
from deadpool_run.vault.transfer.streams import Dial, StreamPool, StripedReceives
from deadpool_run.vault.vault import Held, Vault
from deadpool_run.wire.peers import Peer, Traffic


class Timeline:
    """The number of the present timeline, which grows with each rollback and each generation."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.number = 0

    def begin(self, number: int) -> None:
        """Begin a timeline."""
        with self._changed:
            self.number = number
            self._changed.notify_all()

    def wait_for(self, number: int, timeout_s: float) -> None:
        """Wait up to `timeout_s` until this timeline or a later one has begun."""
        with self._changed:
            self._changed.wait_for(lambda: self.number >= number, timeout_s)


@dataclass(slots=True)
class CopyTimes:
    """How long the last snapshot took that was copied to a buddy; 0 before the first."""

    copied_s: float = 0.0
    """From the offer to the buddy's answer that it holds the snapshot."""
    hashed_s: float = 0.0
    """The part of it in which digests were computed here."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The state that a replicator's threads share."""

    vault: Vault
    streams: int
    """The maximum number of connections for one segment."""
    bucket: Bucket
    closing: threading.Event
    hasher: Hasher
    slot_digests: SlotDigests
    replicas: Replicas
    dial: Dial
    here: Peer
    """Where other nodes reach this one."""
    timeline: Timeline = field(default_factory=Timeline)
    captures: threading.Condition = field(default_factory=threading.Condition)
    """Notified when a rank that lives here has captured or skipped a version."""
    striped_receives: StripedReceives = field(default_factory=StripedReceives)
    sent: Meter = field(default_factory=Meter)
    received: Meter = field(default_factory=Meter)
    deduplicated: Meter = field(default_factory=Meter)
    """Bytes that buddies had already."""
    copy_times: CopyTimes = field(default_factory=CopyTimes)

    def connections_to(self, peer: Peer) -> StreamPool:
        """Return connections to a node's vault, none of which is open yet."""
        return StreamPool(lambda: self.dial(peer.address, peer.port))

    def traffic(self, fetched_bytes: int, fetched_s: float) -> Traffic:
        """Return what was copied between this node and others, and how fast. The arguments are of the last fetch."""
        return Traffic(
            sent_bytes=self.sent.total,
            received_bytes=self.received.total,
            spared_bytes=self.deduplicated.total,
            sent_bytes_per_s=self.sent.rate(),
            received_bytes_per_s=self.received.rate(),
            copied_s=self.copy_times.copied_s,
            hashed_s=self.copy_times.hashed_s,
            fetched_bytes=fetched_bytes,
            fetched_s=fetched_s,
            without_memory=self.replicas.without_memory(),
        )


class Source:
    """A snapshot or transcript open for reading. `still` returns whether it is unchanged."""

    def __init__(self, fd: int, digests: ChunkDigests, still: Callable[[], bool], on_close: Callable[[], None]) -> None:
        """Map the descriptor, which `on_close` closes, also if this raises OSError."""
        self.fd, self.digests, self.still = fd, digests, still
        self.token, self.nbytes = digests.token, digests.nbytes
        self._on_close = on_close
        try:
            self._mapped = mmap.mmap(fd, self.nbytes, prot=mmap.PROT_READ)
        except OSError:
            on_close()
            raise
        self.view = memoryview(self._mapped)

    def places(self, block: int) -> dict[bytes, int]:
        """Return where chunks with known digests are, those of this block among them."""
        if block < self.digests.blocks:
            self.digests.of_block(block, self.view)
        return self.digests.places

    def close(self) -> None:
        """Close it."""
        self.view.release()
        self._mapped.close()
        self._on_close()


def find(shared: Shared, rank: Rank, version: Version | None) -> Source | None:
    """Open the rank's snapshot (None: transcript): its own if it lives here, else a copy."""
    own = open_transcript(shared, rank) if version is TRANSCRIPT else _open_own(shared, rank, version)
    return own or open_copy(shared.replicas, rank, version)


def open_held(shared: Shared, rank: Rank, held: Held) -> Source | None:
    """Open the rank's own slot with this snapshot."""
    fd = shared.vault.open(rank, held)
    if fd is None:
        return None
    digests = shared.slot_digests.of(rank, held)
    return Source(fd, digests, lambda: shared.vault.still(rank, held), lambda: os.close(fd))


def open_transcript(shared: Shared, rank: Rank) -> Source | None:
    """Open the rank's own transcript, if it is complete."""
    fd = shared.vault.open_transcript(rank)
    if fd is None:
        return None
    header = segments.blob_header(fd)
    if header is None:
        os.close(fd)
        return None
    nbytes, token = header
    digests = ChunkDigests(shared.hasher, rank, TRANSCRIPT, token, nbytes)
    return Source(fd, digests, lambda: segments.blob_header(fd) == header, lambda: os.close(fd))


@contextlib.contextmanager
def similar(shared: Shared, rank: Rank, version: Version | None, *, timeout_s: float) -> Iterator[list[Source]]:
    """Open segments with probably many equal chunks to this snapshot of another node's rank; none for a transcript.

    Those are: the same version of each rank that lives here, for which it waits up to `timeout_s`; older copies of the
    rank itself; and copies of this version of other ranks.
    """
    if version is TRANSCRIPT:
        yield []
        return
    vault, replicas = shared.vault, shared.replicas
    with shared.captures:
        shared.captures.wait_for(lambda: all(vault.is_past(each, version) for each in vault.ranks()), timeout_s)
    held = replicas.held()
    wanted = [
        *(partial(_open_own, shared, each, version) for each in vault.ranks()),
        *(partial(open_copy, replicas, rank, older) for older in sorted(held.get(rank, ()), reverse=True)),
        *(partial(open_copy, replicas, each, version) for each in held if each != rank and version in held[each]),
    ]
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(contextlib.closing(found)) for each in wanted if (found := each()) is not None]


def _open_own(shared: Shared, rank: Rank, version: Version) -> Source | None:
    held = next((each for each in shared.vault.held(rank) if each.version == version), None)
    return None if held is None else open_held(shared, rank, held)


def open_copy(replicas: Replicas, rank: Rank, version: Version | None) -> Source | None:
    """Open the copy of the rank's snapshot (None: transcript), if it is here."""
    found = replicas.open(rank, version)
    if found is None:
        return None
    copy, fd = found
    return Source(fd, copy.digests, lambda: replicas.still(rank, copy), lambda: replicas.shut(copy, fd))


def is_sound(fd: int, version: Version | None, token: bytes, nbytes: int) -> bool:
    """Return whether a received segment is complete, readable, and of this version, content and size."""
    if version is TRANSCRIPT:
        return segments.blob_header(fd) == (nbytes, token) and segments.read_blob(fd) is not None
    header = segments.read_complete(fd, version)
    if header is None or (header.used_bytes, header.token) != (nbytes, token):
        return False
    try:
        return segments.manifest_is_whole(fd, header)
    except SnapshotError:
        return False
