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
from deadpool_run.vault.transfer.chunks import ChunkDigests, Hasher
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


class OwnSlots:
    """The slots of this node's ranks, with what each snapshot in them needs again and again. Thread-safe."""

    def __init__(self, hasher: Hasher) -> None:
        self._hasher = hasher
        self._lock = threading.Lock()
        self._digests: dict[tuple[Rank, int], ChunkDigests] = {}
        self._mapped: dict[tuple[Rank, int], tuple[os.stat_result, mmap.mmap]] = {}

    def digests(self, rank: Rank, held: Held) -> ChunkDigests:
        """Return the digests of a slot with this content."""
        with self._lock:
            found = self._digests.get((rank, held.slot))
            if found is None or found.token != held.token:
                found = ChunkDigests(self._hasher, rank, held.version, held.token, held.nbytes)
                self._digests[rank, held.slot] = found
            return found

    def mapped(self, rank: Rank, held: Held, fd: int) -> mmap.mmap:
        """Return a mapping of a slot's memory. It is kept, since each new one would cost page faults."""
        status = os.fstat(fd)
        with self._lock:
            kept = self._mapped.get((rank, held.slot))
            if kept is None or not os.path.samestat(kept[0], status) or len(kept[1]) < held.nbytes:
                kept = self._mapped[rank, held.slot] = status, mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ)
            return kept[1]

    def forget(self, rank: Rank) -> None:
        """Free what is kept of a rank that does not live here any more."""
        with self._lock:
            for slot in (0, 1):
                self._digests.pop((rank, slot), None)
                self._mapped.pop((rank, slot), None)

    def clear(self) -> None:
        """Free what is kept."""
        with self._lock:
            self._digests.clear()
            self._mapped.clear()


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
    slots: OwnSlots
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

    def __init__(
        self, mapped: mmap.mmap, digests: ChunkDigests, still: Callable[[], bool], on_close: Callable[[], None]
    ) -> None:
        """Read from a mapping, which lives as long as anyone refers to it."""
        self.digests, self.still = digests, still
        self.token, self.nbytes = digests.token, digests.nbytes
        self._on_close = on_close
        self.view = memoryview(mapped)[: self.nbytes]

    @classmethod
    def of_file(
        cls, fd: int, digests: ChunkDigests, still: Callable[[], bool], on_close: Callable[[], None]
    ) -> "Source":
        """Map a file that `on_close` closes, also if this raises OSError."""
        try:
            return cls(mmap.mmap(fd, digests.nbytes, prot=mmap.PROT_READ), digests, still, on_close)
        except OSError:
            on_close()
            raise

    def places(self, block: int) -> dict[bytes, int]:
        """Return where chunks with known digests are, those of this block among them."""
        if block < self.digests.blocks:
            self.digests.of_block(block, self.view)
        return self.digests.places

    def close(self) -> None:
        """Close it."""
        self.view.release()
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
    try:
        mapped = shared.slots.mapped(rank, held, fd)
    finally:
        os.close(fd)
    return Source(mapped, shared.slots.digests(rank, held), lambda: shared.vault.still(rank, held), lambda: None)


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
    return Source.of_file(fd, digests, lambda: segments.blob_header(fd) == header, lambda: os.close(fd))


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
    return Source.of_file(fd, copy.digests, lambda: replicas.still(rank, copy), lambda: replicas.shut(copy, fd))


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
