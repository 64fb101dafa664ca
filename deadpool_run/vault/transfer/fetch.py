"""Fetches the transcript or snapshot of a rank for a replacement here, each in its own thread."""

import contextlib
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from deadpool_run.errors import DeadpoolError, ProtocolError, SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.status_page import BUSY, EMPTY
from deadpool_run.vault.transfer import headers
from deadpool_run.vault.transfer.catalog import Shared, is_sound, similar
from deadpool_run.vault.transfer.chunks import ChunkDigests
from deadpool_run.vault.transfer.exchange import Incoming
from deadpool_run.vault.transfer.framing import Outcome
from deadpool_run.vault.transfer.replicas import TRANSCRIPT, Memory
from deadpool_run.vault.transfer.sender import Dial
from deadpool_run.vault.transfer.streams import StreamPool
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.peers import Peer

T = TypeVar("T")


class FetchTask(Generic[T]):
    """Fetches one segment from a peer, after the rank's last fetch task has ended.

    `on_end` is called on the task's thread with the result of `act`, or with None and the error.
    """

    def __init__(  # noqa: PLR0913 - what it asks, does and tells
        self,
        *,
        name: str,
        peer: Peer,
        dial: Dial,
        act: Callable[[StreamPool], T],
        on_end: Callable[[T | None, str | None], object],
        after: "FetchTask[Any] | None",
    ) -> None:
        """Start."""
        self._peer, self._act, self._on_end, self._after = peer, act, on_end, after
        self._stream_pool = StreamPool(lambda: dial(peer.address, peer.port))
        self.thread = threading.Thread(target=self._run, name=f"deadpool-{name}", daemon=True)
        self.thread.start()

    def stop(self) -> None:
        """End the thread; the task fails unless it is complete."""
        self._stream_pool.shut_down()

    def _run(self) -> None:
        if self._after is not None:
            self._after.thread.join()  # it was stopped; two tasks must not write to the same memory
            self._after = None
        result: T | None = None
        failure: str | None = "an unexpected error"
        try:
            with contextlib.closing(self._stream_pool) as stream_pool:
                result = self._act(stream_pool)
            failure = None
        except (OSError, DeadpoolError) as error:
            failure = f"{self._peer.node} ({self._peer.address}:{self._peer.port}): {error}"
        finally:
            self._on_end(result, failure)


def fetch_transcript(shared: Shared, rank: Rank, timeline: int, stream_pool: StreamPool) -> Memory:
    """Return the rank's transcript in memory that the caller owns. Raises OSError and `DeadpoolError`."""
    connection, memory = stream_pool.first(), Memory(segments.create_memory(f"{rank}-transcript"))
    try:
        have = _ask(connection, rank, TRANSCRIPT, timeline, of=1)
        with memory.view(have.nbytes) as view:
            digests = ChunkDigests(shared.hasher, rank, TRANSCRIPT, have.token, have.nbytes)
            _receive(connection, Incoming(view, digests, [], shared.received), 0, 1)
        _check(is_sound(memory.fd, TRANSCRIPT, have.token, have.nbytes), f"the transcript of rank {rank}")
    except BaseException:
        memory.close()
        raise
    return memory


def fetch_snapshot(shared: Shared, rank: Rank, version: Version, timeline: int, stream_pool: StreamPool) -> int:
    """Fetch this version into the rank's slots; return its size. Raises OSError and `DeadpoolError`.

    It replaces the older snapshot; the other slot is emptied when it is complete. The slots stay the same files, because the
    worker may already have their descriptors. Equal chunks that were hashed here already are copied.
    """
    vault, have = shared.vault, _ask(stream_pool.first(), rank, version, timeline, of=shared.streams)
    connections = 1 + stream_pool.open(have.of - 1)

    def fetch_parts(first: int, incoming: Incoming, connection: PeerConnection) -> None:
        for part in range(first, have.of, connections):
            same = part == 0 or _ask(connection, rank, version, timeline, part=part, of=have.of) == have
            _check(same, f"part {part} of snapshot {version} of rank {rank}")
            _receive(connection, incoming, part, have.of)

    fds = vault.open_slots(rank)
    if fds is None:
        raise SnapshotError(f"rank {rank} does not live on this node any more")
    try:
        held = {each.slot: each.version for each in vault.held(rank)}
        slot = min((0, 1), key=lambda slot: held.get(slot, EMPTY))
        _empty(shared, rank, slot, fds[slot], BUSY)
        try:
            with (
                contextlib.closing(Memory(os.dup(fds[slot]))) as memory,
                memory.view(have.nbytes) as view,
                similar(shared, rank, version, timeout_s=0) as sources,
            ):
                digests = ChunkDigests(shared.hasher, rank, version, have.token, have.nbytes)
                hashed = [
                    source for source in sources if source.digests.are_known()
                ]  # a repair waits: hash nothing now
                incoming = Incoming(view, digests, hashed, shared.received)
                stream_pool.work(*(partial(fetch_parts, first, incoming) for first in range(connections)))
            sound = is_sound(fds[slot], version, have.token, have.nbytes)
            sound = sound and segments.read_manifest(fds[slot], version).rank == rank
            _check(sound, f"snapshot {version} of rank {rank}")
        except BaseException:
            _empty(shared, rank, slot, fds[slot], EMPTY)
            raise
        vault.set_slot(rank, slot, fds[slot], version)
        _empty(shared, rank, 1 - slot, fds[1 - slot], EMPTY)
    finally:
        for fd in fds:
            os.close(fd)
    return have.nbytes


def _empty(shared: Shared, rank: Rank, slot: int, fd: int, state: int) -> None:
    """Empty a slot, and publish it as `EMPTY` or `BUSY`."""
    shared.vault.set_slot(rank, slot, fd, state)
    segments.mark_empty(fd)


def _check(sound: bool, what: str) -> None:
    if not sound:
        raise SnapshotError(f"{what} arrived damaged")


def _ask(  # noqa: PLR0913 - what is asked for
    connection: PeerConnection, rank: Rank, version: Version | None, timeline: int, *, part: int = 0, of: int
) -> headers.Have:
    """Ask for a part of a segment; return what is announced. The part follows."""
    headers.send(connection, headers.Get(rank, version, timeline, part, of))
    answer = headers.receive_answer(connection)
    match answer:
        case headers.Have():
            return answer
        case headers.No(why):
            raise SnapshotError(why[:200])
        case _:
            raise ProtocolError(f"a vault answers {type(answer).__name__} to Get")


def _receive(connection: PeerConnection, incoming: Incoming, part: int, of: int) -> None:
    outcome = incoming.receive(connection, part, of)
    if outcome is not Outcome.WHOLE:
        raise ProtocolError(f"the peer sent a {outcome.name.lower()} segment")
