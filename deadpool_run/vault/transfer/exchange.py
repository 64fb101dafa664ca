"""Exchange of a segment: digests first, then only the chunks that the receiver does not find in its own memory.

    sender                                      receiver
    the digests of a block                ->
                                          <-    a byte for each chunk: 1 if it is missing
    the missing chunks of the block       ->
    the outcome, and the root digest      ->

The digests of the next blocks are sent before a block's answer has come. With several connections, each carries every
of-th block in this way, on threads of its own. Everything but the chunks themselves has a tag (`wire.tags`): the digests
vouch for the chunks.

Ranks of a replicated model (DDP, the replicate dimension of HSDP) have the same bytes in their snapshots. So has a rank from
one snapshot to the next, in weights that it does not train. The digests show this; no option declares it. What was received
is hashed. What was copied is not: it counts only if its source still has the same token after the copy.
"""

import hmac
import re
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence

from deadpool_run.errors import ProtocolError
from deadpool_run.vault.transfer import framing
from deadpool_run.vault.transfer.catalog import Shared, Source
from deadpool_run.vault.transfer.chunks import DIGEST_BYTES, ChunkDigests, Range, split
from deadpool_run.vault.transfer.framing import Meter, Outcome
from deadpool_run.wire.peer_connection import PeerConnection

PIECE_BYTES = 1 << 20
"""The most bytes for which the bandwidth is asked at a time."""
_WINDOW = 2
"""The number of blocks that may be unanswered while another one is hashed."""
_HEAD = struct.Struct("<II")
_DIGESTS, _CHUNKS, _END = range(3)
_MISSING = re.compile(b"\1+")


def send_part(
    connection: PeerConnection, source: Source, shared: Shared, blocks: range, still: Callable[[], bool]
) -> Outcome:
    """Send these blocks while `still` is true; then call `end_part`. Raises OSError."""
    unanswered: deque[int] = deque()
    for block in blocks:
        if not still():
            break
        digests = source.digests.of_block(block, source.view)
        connection.send(_HEAD.pack(_DIGESTS, len(digests)), digests)
        unanswered.append(block)
        if len(unanswered) > _WINDOW:
            _send_missing(connection, source, shared, unanswered.popleft(), still)
    for block in unanswered:
        _send_missing(connection, source, shared, block, still)
    return Outcome.WHOLE if still() else Outcome.TORN


def end_part(connection: PeerConnection, digests: ChunkDigests, part: int, of: int, outcome: Outcome) -> None:
    """Send the outcome of a part. Raises OSError."""
    connection.send(_HEAD.pack(_END, outcome), digests.root(part, of))


def _send_missing(
    connection: PeerConnection, source: Source, shared: Shared, number: int, still: Callable[[], bool]
) -> None:
    block = source.digests.block(number)
    answer = framing.receive_tagged(connection, len(block))
    runs = [(block[run.start()][0], block[run.end() - 1][1]) for run in _MISSING.finditer(answer)]
    missing = sum(end - begin for begin, end in runs)
    shared.deduplicated.add(block[-1][1] - block[0][0] - missing)
    if missing and still():
        head = _HEAD.pack(_CHUNKS, missing)
        connection.sock.sendall(head + connection.sending.tag(head), socket.MSG_MORE)
        for begin, end in runs:
            for at in range(begin, end, PIECE_BYTES):
                with source.view[at : min(at + PIECE_BYTES, end)] as piece:
                    shared.bucket.take(len(piece))
                    connection.sock.sendall(piece)
                    shared.sent.add(len(piece))


class Incoming:
    """A segment that is received. `sources` may have equal chunks. Subclasses say where the chunks go."""

    def __init__(self, digests: ChunkDigests, sources: Sequence[Source], meter: Meter) -> None:
        self._digests, self._sources, self._meter = digests, sources, meter

    def _space(self, chunk: Range) -> memoryview:
        """Return memory for a chunk, which the caller releases."""
        raise NotImplementedError

    def _lacks(self, chunk: Range) -> bool:  # noqa: ARG002 - for subclasses
        """Return whether the chunk is not here yet."""
        return True

    def _arrived(self, chunk: Range, data: memoryview) -> None:
        """Note that a chunk with the announced digest is in its space."""

    def receive(self, connection: PeerConnection, part: int, of: int) -> Outcome:
        """Receive what `send_part` and `end_part` send. Raises OSError and `ProtocolError`."""
        due = iter(range(part, self._digests.blocks, of))
        answered: deque[list[tuple[Range, bytes]]] = deque()
        sources = list(self._sources)
        outcome = Outcome.WHOLE
        while True:
            kind, number = _HEAD.unpack(framing.receive_tagged(connection, _HEAD.size))
            if kind == _END:
                break
            if kind == _DIGESTS and (block := next(due, None)) is not None:
                if missing := self._answer(connection, block, number, sources):
                    answered.append(missing)
            elif kind == _CHUNKS and answered:
                outcome = max(outcome, self._take(connection, number, answered.popleft()))
            else:
                raise ProtocolError(f"a message of kind {kind} and number {number} is not due")
        root = framing.receive_tagged(connection, DIGEST_BYTES)
        if number != Outcome.WHOLE:
            return Outcome.TORN
        if answered or next(due, None) is not None:
            raise ProtocolError(f"a segment of {self._digests.nbytes} bytes ended early")
        return outcome if hmac.compare_digest(root, self._digests.root(part, of)) else Outcome.DAMAGED

    def _answer(
        self, connection: PeerConnection, number: int, length: int, sources: list[Source]
    ) -> list[tuple[Range, bytes]]:
        """Receive a block's digests and copy the chunks that are here; return the other ones and their digests."""
        block = self._digests.block(number)
        if length != DIGEST_BYTES * len(block):
            raise ProtocolError(f"{length} bytes of digests are not those of a block of {len(block)} chunks")
        body = framing.receive_tagged(connection, length)
        self._digests.put(number, body)
        missing = {chunk: digest for chunk, digest in zip(block, split(body), strict=True) if self._lacks(chunk)}
        for source in list(sources):
            if not missing:
                break
            places = source.places(number)
            found = [
                chunk
                for chunk, digest in missing.items()
                if digest in places and self._copy(source, places[digest], chunk)
            ]
            if found:
                sources.remove(source)
                sources.insert(0, source)  # is searched first from now on
            for chunk in found:
                del missing[chunk]
        connection.send(bytes(chunk in missing for chunk in block))
        return list(missing.items())

    def _copy(self, source: Source, place: int, chunk: Range) -> bool:
        """Copy a chunk; return whether it is the wanted one, because its source may have been overwritten meanwhile."""
        with self._space(chunk) as target, source.view[place : place + len(target)] as found:
            if len(found) != len(target):
                return False
            target[:] = found  # between mappings: cheaper than `preadv`
            if not source.still():  # asked after the copy; then what was hashed is what was copied
                return False
            self._arrived(chunk, target)
            return True

    def _take(self, connection: PeerConnection, length: int, missing: list[tuple[Range, bytes]]) -> Outcome:
        """Receive the missing chunks of a block; return whether they are those that were announced."""
        if length != sum(end - begin for (begin, end), _ in missing):
            raise ProtocolError(f"{length} bytes of chunks are not those that are missing")
        outcome = Outcome.WHOLE
        for chunk, digest in missing:
            with self._space(chunk) as target:
                framing.receive_into(connection.sock, target)
                if hmac.compare_digest(self._digests.hasher.chunk(target), digest):
                    self._arrived(chunk, target)
                else:
                    outcome = Outcome.DAMAGED
        self._meter.add(length)
        return outcome


class IncomingCopy(Incoming):
    """A segment that is received into `view`, which has its size."""

    def __init__(self, view: memoryview, digests: ChunkDigests, sources: Sequence[Source], meter: Meter) -> None:
        super().__init__(digests, sources, meter)
        self._view = view

    def _space(self, chunk: Range) -> memoryview:
        return self._view[slice(*chunk)]


def receive_whole(connection: PeerConnection, incoming: Incoming, part: int, of: int) -> None:
    """Receive a part of a segment, whole. Raises OSError and `ProtocolError`."""
    outcome = incoming.receive(connection, part, of)
    if outcome is not Outcome.WHOLE:
        raise ProtocolError(f"the peer sent a {outcome.name.lower()} segment")
