"""Adds snapshots to parities, and computes a lost rank's snapshot from a parity and the snapshots of the other ranks."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain

from deadpool_run.errors import DeadpoolError, SnapshotError
from deadpool_run.ids import Rank
from deadpool_run.vault.transfer.catalog import Shared, Source, find
from deadpool_run.vault.transfer.chunks import CHUNK_BYTES, ChunkDigests, Range, number_of
from deadpool_run.vault.transfer.exchange import Incoming, receive_whole
from deadpool_run.vault.transfer.framing import Meter
from deadpool_run.vault.transfer.headers import ask
from deadpool_run.vault.transfer.parity import Parity, ParityPart, xor_into
from deadpool_run.vault.transfer.streams import StreamPool
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.peers import Peer


class _Apart(Incoming):
    """A segment whose chunks are not kept as they are. Each thread that receives has space for one."""

    def __init__(self, digests: ChunkDigests, sources: Sequence[Source], meter: Meter) -> None:
        super().__init__(digests, sources, meter)
        self._own = threading.local()

    def _space(self, chunk: Range) -> memoryview:
        if not hasattr(self._own, "space"):
            self._own.space = bytearray(CHUNK_BYTES)
        return memoryview(self._own.space)[: chunk[1] - chunk[0]]


class IncomingPart(_Apart):
    """A snapshot that is added to a parity."""

    def __init__(self, parity: Parity, part: ParityPart, sources: Sequence[Source], meter: Meter) -> None:
        super().__init__(part.digests, sources, meter)
        self._parity, self._part = parity, part

    def _lacks(self, chunk: Range) -> bool:
        return not self._part.added[number_of(chunk)]

    def _arrived(self, chunk: Range, data: memoryview) -> None:
        self._parity.add(self._part, number_of(chunk), data)


class _Remainder:
    """A lost rank's snapshot, once those of all other ranks of its group have been taken out of the parity."""

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self._lock = threading.Lock()

    def take_out(self, chunk: Range, data: memoryview) -> None:
        """Take out a chunk of another rank's snapshot, which may be longer than this one."""
        begin, end = chunk[0], min(chunk[1], len(self.view))
        if begin < end:
            with self._lock, self.view[begin:end] as target, data[: end - begin] as part:
                xor_into(target, part)


class _IncomingOther(_Apart):
    """A snapshot of another rank of the group, to be taken out."""

    def __init__(self, remainder: _Remainder, digests: ChunkDigests, meter: Meter) -> None:
        super().__init__(digests, [], meter)
        self._remainder = remainder

    def _lacks(self, chunk: Range) -> bool:
        return chunk[0] < len(self._remainder.view)

    def _arrived(self, chunk: Range, data: memoryview) -> None:
        self._remainder.take_out(chunk, data)


class Others:
    """Connections to the nodes with the other ranks' snapshots. `shut_down` ends what is computed with them."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        self._pools: list[StreamPool] = []
        self._stopping = False

    def connect(self, peer: Peer) -> PeerConnection:
        """Return a new connection to a node. Raises OSError."""
        pool = self._shared.connections_to(peer)
        with self._lock:
            self._pools.append(pool)
            if self._stopping:
                pool.shut_down()
        return pool.first()

    def shut_down(self) -> None:
        """End every wait, and open no other connections. Safe from any thread."""
        with self._lock:
            self._stopping = True
            for pool in self._pools:
                pool.shut_down()

    def close(self) -> None:
        """Close the connections."""
        for pool in self._pools:
            pool.close()


class ParityDecoder:
    """Computes snapshots from one parity. For one thread at a time, except `shut_down` of the others."""

    def __init__(self, shared: Shared, parity: Parity, timeline: int, others: Others) -> None:
        self._shared, self._parity, self._timeline, self._others = shared, parity, timeline, others

    def fill(self, rank: Rank, view: memoryview) -> None:
        """Fill `view` with the rank's snapshot. Raises OSError and `DeadpoolError`: all other ranks' snapshots are needed."""
        parity, part = self._parity, self._parity.parts[rank]
        for chunk in _chunks(part.digests):
            with view[slice(*chunk)] as target:
                parity.read(number_of(chunk), target)
        take_out = partial(self._take_out, _Remainder(view))
        others = [each for each in parity.parts.values() if each is not part]
        with ThreadPoolExecutor(len(others), thread_name_prefix="deadpool-parity") as threads:
            results = [threads.submit(take_out, other) for other in others]
            try:
                for result in results:
                    result.result()
            except BaseException:
                self._others.shut_down()
                raise
        if not part.digests.fit(view):
            raise SnapshotError(f"snapshot {parity.version} of rank {rank}, computed from a parity, is damaged")

    def _take_out(self, remainder: _Remainder, other: ParityPart) -> None:
        """Take another rank's snapshot out of the remainder. Raises OSError and `DeadpoolError`."""
        version, digests = self._parity.version, other.digests
        here = find(self._shared, other.rank, version)
        if here is not None:
            with contextlib.closing(here):
                if here.token == digests.token:
                    for chunk in _chunks(digests):
                        with here.view[slice(*chunk)] as data:
                            remainder.take_out(chunk, data)
                    return
        try:
            connection = self._others.connect(other.home)
            have = ask(connection, other.rank, version, self._timeline, of=1)
            if (have.token, have.nbytes) != (digests.token, digests.nbytes):
                raise SnapshotError("it has another snapshot of this version")
            announced = ChunkDigests(self._shared.hasher, other.rank, version, have.token, have.nbytes)
            receive_whole(connection, _IncomingOther(remainder, announced, self._shared.received), 0, have.of)
        except (OSError, DeadpoolError) as error:
            raise SnapshotError(
                f"snapshot {version} of rank {other.rank}, which shares the parity, did not come from "
                f"{other.home.node}: {error}"
            ) from error


def _chunks(digests: ChunkDigests) -> Iterator[Range]:
    return chain.from_iterable(map(digests.block, range(digests.blocks)))
