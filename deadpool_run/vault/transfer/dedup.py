"""What a buddy has already is not sent: the owner says what it looks for, and the buddy searches its own memory for it.

Ranks of a replicated model (DDP, the replicate dimension of HSDP) have the same bytes at the same places of their
snapshots, and so has a rank that does not train a weight from one snapshot to the next. Nothing of this is declared: a
chunk counts as found when the bytes that were copied for it have the digest that the owner has sent (SHA-256, of which
16 bytes are used), so that what only looks alike is sent as ever.

    owner                                                     buddy
    Put(..., compare=True)                   ->
                                             <-               Go()
    count, count x (index, digest)           ->                                   blocks, until one of count 0
                                             <-               a bit for each      two blocks at most are unanswered
    the bytes of all other chunks            ->               as `framing` has them

Digests cost the owner a pass over its memory. So it asks for all chunks at first, then for those that have been found of
late, and now and then for all of them again.
"""

import hashlib
import os
import socket
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from deadpool_run.errors import ProtocolError
from deadpool_run.vault.segments import HEADER_BYTES
from deadpool_run.vault.transfer import framing
from deadpool_run.vault.transfer.catalog import Source
from deadpool_run.vault.transfer.framing import Range

CHUNK_BYTES = 256 << 10
"""Small enough that what differs, at a snapshot's end, does not cost much; the first chunk begins behind the header."""
_BLOCK_CHUNKS = 256
_DIGEST_BYTES = 16
_COUNT = struct.Struct(">I")
_CHUNK = struct.Struct(f">I{_DIGEST_BYTES}s")
_ALL_EVERY = 32
_STRIKES = 3
"""Times that a chunk may be missed on end before it is no longer asked for: the buddy's own ranks may have been late."""
_PROBES = 16
"""Chunks in which something must have been right at least once, to be looked at further."""


def chunk(index: int, nbytes: int) -> Range:
    """Return where a chunk of a segment of so many bytes begins and ends."""
    begin = HEADER_BYTES + index * CHUNK_BYTES
    return begin, min(begin + CHUNK_BYTES, nbytes)


def chunks(nbytes: int) -> int:
    """Return how many there are."""
    return max(0, -(-(nbytes - HEADER_BYTES) // CHUNK_BYTES))


def rest(nbytes: int, found: Collection[int]) -> list[Range]:
    """Return what is left to send when these chunks were found, as few ranges in order."""
    ranges = [(0, min(HEADER_BYTES, nbytes))]
    for index in range(chunks(nbytes)):
        if index not in found:
            begin, end = chunk(index, nbytes)
            if ranges[-1][1] == begin:
                begin = ranges.pop()[0]
            ranges.append((begin, end))
    return ranges


# --- the owner's side ------------------------------------------------------------------------------------------------


class ChunkHistory:
    """Which chunks one buddy may have, as far as earlier snapshots tell."""

    def __init__(self) -> None:
        self._missed: dict[int, int] = {}
        self._times = 0

    def worth_asking(self, nbytes: int) -> list[int]:
        """Return the chunks to ask for: a few from all over it first, so that the buddy learns soon where to look."""
        self._times += 1
        everything = self._times % _ALL_EVERY == 0
        wanted = [index for index in range(chunks(nbytes)) if everything or self._missed.get(index, 0) < _STRIKES]
        step = max(1, len(wanted) // _PROBES)
        first = wanted[::step][:_PROBES]
        probed = set(first)
        return first + [index for index in wanted if index not in probed]

    def learn(self, asked: Collection[int], found: Collection[int]) -> None:
        """Note what came of it."""
        for index in asked:
            if index in found:
                self._missed.pop(index, None)
            else:
                self._missed[index] = self._missed.get(index, 0) + 1


def ask(sock: socket.socket, fd: int, nbytes: int, wanted: Sequence[int], still: Callable[[], bool]) -> set[int]:
    """Return which of the wanted chunks the buddy has found. Stops early once `still` is false. Raises OSError."""
    found: set[int] = set()
    unanswered: list[Sequence[int]] = []
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for at in range(0, len(wanted), _BLOCK_CHUNKS):
        if not still():
            break
        block = wanted[at : at + _BLOCK_CHUNKS]
        body = b"".join(_CHUNK.pack(index, _read(fd, chunk(index, nbytes), buffer)) for index in block)
        sock.sendall(_COUNT.pack(len(block)) + body)
        unanswered.append(block)
        if len(unanswered) > 1:
            found.update(_answer(sock, unanswered.pop(0)))
    sock.sendall(_COUNT.pack(0))
    for block in unanswered:
        found.update(_answer(sock, block))
    return found


def _answer(sock: socket.socket, block: Sequence[int]) -> Iterator[int]:
    bits = bytearray(-(-len(block) // 8))
    framing.receive_into(sock, memoryview(bits))
    return (index for at, index in enumerate(block) if bits[at // 8] >> at % 8 & 1)


# --- the buddy's side ------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Place:
    """Where to look."""

    open: Callable[[], Source | None]
    memory: Source | None = None
    hits: int = 0
    misses: int = 0

    @property
    def is_hopeless(self) -> bool:
        return not self.hits and self.misses >= _PROBES


class ChunkLookup:
    """Looks for chunks in memory that is here, at the same offsets. Places are opened when they are first looked at."""

    def __init__(self, places: Sequence[Callable[[], Source | None]]) -> None:
        self._places = [_Place(each) for each in places]

    def close(self) -> None:
        """Let go of what was opened."""
        for place in self._places:
            if place.memory is not None:
                place.memory.close()
        self._places = []

    def answer(self, sock: socket.socket, view: memoryview) -> set[int]:
        """Fill `view`, of the segment's size, with what is here of the chunks that are asked for; return which those are.

        Raises OSError and `ProtocolError`.
        """
        found: set[int] = set()
        head = bytearray(_COUNT.size)
        while True:
            framing.receive_into(sock, memoryview(head))
            (count,) = _COUNT.unpack(head)
            if count == 0:
                return found
            if count > _BLOCK_CHUNKS:
                raise ProtocolError(f"a block of {count} chunks is longer than {_BLOCK_CHUNKS}")
            body = bytearray(count * _CHUNK.size)
            framing.receive_into(sock, memoryview(body))
            bits = bytearray(-(-count // 8))
            for at, (index, digest) in enumerate(_CHUNK.iter_unpack(body)):
                if index >= chunks(len(view)):
                    raise ProtocolError(f"there is no chunk {index} in {len(view)} bytes")
                if self._find(chunk(index, len(view)), digest, view):
                    found.add(index)
                    bits[at // 8] |= 1 << at % 8
            sock.sendall(bits)

    def _find(self, where: Range, digest: bytes, view: memoryview) -> bool:
        """Copy the chunk from wherever it is. What counts are the bytes as they were copied."""
        for place in self._places:
            if place.is_hopeless:
                continue
            if place.memory is None:
                place.memory = place.open()
            if place.memory is None or place.memory.nbytes < where[1]:
                place.misses += 1
                continue
            with view[slice(*where)] as target:
                if _read(place.memory.fd, where, target) == digest:
                    place.hits += 1
                    self._prefer(place)
                    return True
            place.misses += 1
        return False

    def _prefer(self, place: _Place) -> None:
        if self._places[0] is not place:
            self._places.remove(place)
            self._places.insert(0, place)


def _read(fd: int, where: Range, target: memoryview) -> bytes:
    """Read bytes of a file to the beginning of `target`, and return their digest. Raises OSError if there are fewer."""
    begin, end = where
    with target[: end - begin] as part:
        at = 0
        while at < len(part):
            count = os.preadv(fd, [part[at:]], begin + at)
            if count == 0:
                raise OSError(f"a segment ends at byte {begin + at}, {end - begin - at} bytes early")
            at += count
        return hashlib.sha256(part).digest()[:_DIGEST_BYTES]
