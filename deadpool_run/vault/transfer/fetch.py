"""Fetches the transcript or snapshot of a rank for a replacement here, each in its own thread."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from deadpool_run.errors import DeadpoolError, SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.status_page import BUSY, EMPTY
from deadpool_run.vault.transfer import headers
from deadpool_run.vault.transfer.catalog import Shared, Source, is_sound, open_copy, similar
from deadpool_run.vault.transfer.chunks import ChunkDigests
from deadpool_run.vault.transfer.decode import Others, ParityDecoder
from deadpool_run.vault.transfer.exchange import Incoming, IncomingCopy, receive_whole
from deadpool_run.vault.transfer.memory import Memory
from deadpool_run.vault.transfer.replicas import TRANSCRIPT
from deadpool_run.vault.transfer.streams import StreamPool
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.peers import Peer

T = TypeVar("T")


class OpenConnections(Protocol):
    """Connections of a task, which another thread may shut down."""

    def shut_down(self) -> None:
        """End every wait on them, and open no others."""

    def close(self) -> None:
        """Close them."""


class FetchTask(Generic[T]):
    """Fetches one segment over connections of its own, after the rank's last fetch task has ended.

    `on_end` is called on the task's thread with the result of `act`, or with None and the error.
    """

    def __init__(  # noqa: PLR0913 - what it asks, does and tells
        self,
        *,
        name: str,
        peer: Peer,
        connections: OpenConnections,
        act: Callable[[], T],
        on_end: Callable[[T | None, str | None], object],
        after: "FetchTask[Any] | None",
    ) -> None:
        """Start. `peer` is the node that errors name."""
        self._peer, self._act, self._on_end, self._after = peer, act, on_end, after
        self._connections = connections
        self.result: T | None = None
        """The result of `act`. None if it failed, or has not ended."""
        self.thread = threading.Thread(target=self._run, name=f"deadpool-{name}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread, and that of the task before; the task fails unless it is complete."""
        if (before := self._after) is not None:
            before.stop()
        self._connections.shut_down()

    def _run(self) -> None:
        if self._after is not None:
            self._after.thread.join()  # two tasks must not write to the same memory
            self._after = None
        result: T | None = None
        failure: str | None = "an unexpected error"
        try:
            with contextlib.closing(self._connections):
                result = self.result = self._act()
            failure = None
        except (OSError, DeadpoolError) as error:
            failure = f"{self._peer.node} ({self._peer.address}:{self._peer.port}): {error}"
        finally:
            self._on_end(result, failure)


def fetch_transcript(shared: Shared, rank: Rank, timeline: int, stream_pool: StreamPool) -> Memory:
    """Return the rank's transcript in memory that the caller owns. Raises OSError and `DeadpoolError`."""
    connection, memory = stream_pool.first(), Memory(segments.create_memory(f"{rank}-transcript"))
    try:
        have = headers.ask(connection, rank, TRANSCRIPT, timeline, of=1)
        with memory.view(have.nbytes) as view:
            digests = ChunkDigests(shared.hasher, rank, TRANSCRIPT, have.token, have.nbytes)
            receive_whole(connection, IncomingCopy(view, digests, [], shared.received), 0, 1)
        _check(is_sound(memory.fd, TRANSCRIPT, have.token, have.nbytes), f"the transcript of rank {rank}")
    except BaseException:
        memory.close()
        raise
    return memory


@dataclass(frozen=True, slots=True)
class Fetched:
    """A snapshot in a slot that is not published yet: its content, and where it is."""

    digests: ChunkDigests
    slot: int


def fetch_snapshot(shared: Shared, rank: Rank, version: Version, timeline: int, stream_pool: StreamPool) -> Fetched:
    """Fetch this version into one of the rank's slots, for `publish`. Raises OSError and `DeadpoolError`.

    Equal chunks that were hashed here already are copied.
    """
    have = headers.ask(stream_pool.first(), rank, version, timeline, of=shared.streams)
    connections = 1 + stream_pool.open(have.of - 1)

    def fetch_parts(first: int, incoming: Incoming, connection: PeerConnection) -> None:
        for part in range(first, have.of, connections):
            same = part == 0 or headers.ask(connection, rank, version, timeline, part=part, of=have.of) == have
            _check(same, f"part {part} of snapshot {version} of rank {rank}")
            receive_whole(connection, incoming, part, have.of)

    digests = ChunkDigests(shared.hasher, rank, version, have.token, have.nbytes)

    def receive(view: memoryview) -> None:
        with similar(shared, rank, version, timeout_s=0) as sources:
            hashed = [source for source in sources if source.digests.are_known()]  # a repair waits: hash nothing now
            incoming = IncomingCopy(view, digests, hashed, shared.received)
            stream_pool.work(*(partial(fetch_parts, first, incoming) for first in range(connections)))

    return _fill_slot(shared, rank, version, digests, receive)


def compute_snapshot(shared: Shared, rank: Rank, version: Version, timeline: int, others: Others) -> Fetched:
    """Take this version from the copy here, or compute it from the parity, into one of the rank's slots, for `publish`.

    Raises OSError and `DeadpoolError`.
    """
    source = open_copy(shared.replicas, rank, version)
    if source is not None:
        with contextlib.closing(source):
            return _fill_slot(shared, rank, version, source.digests, partial(_copy, source))
    parities = shared.replicas.parities
    parity = parities.open(rank, version)
    if parity is None:
        raise SnapshotError(f"there is no parity with snapshot {version} of rank {rank}")
    try:
        digests = parity.parts[rank].digests
        decoder = ParityDecoder(shared, parity, timeline, others)
        return _fill_slot(shared, rank, version, digests, partial(decoder.fill, rank))
    finally:
        parities.shut(parity)


def _copy(source: Source, view: memoryview) -> None:
    view[:] = source.view
    _check(source.digests.fit(view), "a copy on this node")


def is_held(vault: Vault, rank: Rank, version: Version) -> bool:
    """Return whether a slot of the rank here has this version."""
    return any(each.version == version for each in vault.held(rank))


def check_held(vault: Vault, rank: Rank, version: Version) -> None:
    """Raise `SnapshotError` if no slot of the rank here has this version."""
    if not is_held(vault, rank, version):
        raise SnapshotError(f"a fetch that was cancelled has taken the slot of snapshot {version} of rank {rank}")


def publish(shared: Shared, rank: Rank, version: Version, fetched: Fetched) -> int:
    """Publish the slot with this version, and empty the other one unless another loss may need it; return the size.

    The rank's worker waits for this: it reads and empties slots at the end of its set-up. Raises `SnapshotError`.
    """
    digests, slot = fetched.digests, fetched.slot
    with _open_slots(shared.vault, rank) as fds:
        header = segments.read_complete(fds[slot], version)
        _check(header is not None and header.token == digests.token, f"snapshot {version} of rank {rank}")
        shared.vault.set_slot(rank, slot, fds[slot], version)
        if 1 - slot not in _needed(shared, rank, version):
            _empty(shared, rank, 1 - slot, fds[1 - slot], EMPTY)
    return digests.nbytes


def _fill_slot(
    shared: Shared, rank: Rank, version: Version, digests: ChunkDigests, receive: Callable[[memoryview], object]
) -> Fetched:
    """Have a slot filled: that of the older snapshot which no loss needs, else that of the newer one.

    The older one may be the committed one. The slots stay the same files, because the worker may already have their
    descriptors. Raises OSError and `DeadpoolError`.
    """
    vault = shared.vault
    with _open_slots(vault, rank) as fds:
        held, needed = {each.slot: each.version for each in vault.held(rank)}, _needed(shared, rank, version)
        unneeded = sorted({0, 1} - needed.keys(), key=lambda slot: held.get(slot, EMPTY))
        slot = unneeded[0] if unneeded else max(needed, key=needed.__getitem__)
        _empty(shared, rank, slot, fds[slot], BUSY)
        try:
            with contextlib.closing(Memory(os.dup(fds[slot]))) as memory, memory.view(digests.nbytes) as view:
                receive(view)
            sound = is_sound(fds[slot], version, digests.token, digests.nbytes)
            sound = sound and segments.read_manifest(fds[slot], version).rank == rank
            _check(sound, f"snapshot {version} of rank {rank}")
        except BaseException:
            _empty(shared, rank, slot, fds[slot], EMPTY)
            raise
    return Fetched(digests, slot)


@contextlib.contextmanager
def _open_slots(vault: Vault, rank: Rank) -> Iterator[list[int]]:
    """Open the rank's slots. Raises `SnapshotError` if it does not live here."""
    fds = vault.open_slots(rank)
    if fds is None:
        raise SnapshotError(f"rank {rank} does not live on this node any more")
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def _needed(shared: Shared, rank: Rank, version: Version) -> dict[int, Version]:
    """Return the slots with other versions that another loss may need."""
    may_need = shared.replicas.retention.may_need
    return {
        held.slot: held.version
        for held in shared.vault.held(rank)
        if held.version != version and may_need(held.version)
    }


def _empty(shared: Shared, rank: Rank, slot: int, fd: int, state: int) -> None:
    """Empty a slot, and publish it as `EMPTY` or `BUSY`."""
    shared.vault.set_slot(rank, slot, fd, state)
    segments.mark_empty(fd)


def _check(sound: bool, what: str) -> None:
    if not sound:
        raise SnapshotError(f"{what} arrived damaged")
