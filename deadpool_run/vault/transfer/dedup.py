"""Deduplication: the owner sends digests of its chunks, and the buddy searches its own memory for equal chunks.

Ranks of a replicated model (DDP, the replicate dimension of HSDP) have the same bytes at the same offsets of their
snapshots. So has a rank from one snapshot to the next, in weights that it does not train. The owner declares none of this:
a chunk is found if the bytes that were copied for it have the digest that the owner sent (16 bytes of SHA-256).

    owner                                                     buddy
    Put(..., compare=True)                   ->
                                             <-               Go()
    count, count x (index, digest)           ->                                   blocks, until one of count 0
                                             <-               a bit for each      two blocks at most are unanswered
    the bytes of all other chunks            ->               as `framing` has them

Digests cost the owner a pass over its memory. So it asks for all chunks at first, then for those that were found recently,
and from time to time for all of them again.
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
"""Small, so that the different bytes at a snapshot's end cost little. The first chunk begins after the header."""
_BLOCK_CHUNKS = 256
_DIGEST_BYTES = 16
_COUNT = struct.Struct(">I")
_CHUNK = struct.Struct(f">I{_DIGEST_BYTES}s")
_ALL_EVERY = 32
_STRIKES = 3
"""Consecutive misses before a chunk is not asked for any more; the buddy's own ranks may have been late."""
_PROBES = 16
"""A source without a hit in this many chunks is not searched any more."""


def chunk(index: int, nbytes: int) -> Range:
    """Return the range of a chunk in a segment of `nbytes` bytes."""
    begin = HEADER_BYTES + index * CHUNK_BYTES
    return begin, min(begin + CHUNK_BYTES, nbytes)


def chunks(nbytes: int) -> int:
    """Return the number of chunks."""
    return max(0, -(-(nbytes - HEADER_BYTES) // CHUNK_BYTES))


def rest(nbytes: int, found: Collection[int]) -> list[Range]:
    """Return the ranges to send besides the found chunks: merged, in order."""
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
    """The chunks that one buddy had in earlier snapshots."""

    def __init__(self) -> None:
        self._missed: dict[int, int] = {}
        self._times = 0

    def worth_asking(self, nbytes: int) -> list[int]:
        """Return the chunks to ask for, with a few spread ones first: they show the buddy which sources to search."""
        self._times += 1
        everything = self._times % _ALL_EVERY == 0
        wanted = [index for index in range(chunks(nbytes)) if everything or self._missed.get(index, 0) < _STRIKES]
        step = max(1, len(wanted) // _PROBES)
        first = wanted[::step][:_PROBES]
        probed = set(first)
        return first + [index for index in wanted if index not in probed]

    def learn(self, asked: Collection[int], found: Collection[int]) -> None:
        """Note the result."""
        for index in asked:
            if index in found:
                self._missed.pop(index, None)
            else:
                self._missed[index] = self._missed.get(index, 0) + 1


def ask(sock: socket.socket, fd: int, nbytes: int, wanted: Sequence[int], still: Callable[[], bool]) -> set[int]:
    """Ask for the wanted chunks; return the found ones. Stops early once `still` is false. Raises OSError."""
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
class _Candidate:
    """A source to search."""

    open: Callable[[], Source | None]
    memory: Source | None = None
    hits: int = 0
    misses: int = 0


class ChunkLookup:
    """Searches sources on this node for chunks, at the same offsets. A source is opened when it is first searched."""

    def __init__(self, sources: Sequence[Callable[[], Source | None]]) -> None:
        self._candidates = [_Candidate(each) for each in sources]

    def close(self) -> None:
        """Close the opened sources."""
        for candidate in self._candidates:
            if candidate.memory is not None:
                candidate.memory.close()
        self._candidates = []

    def answer(self, sock: socket.socket, view: memoryview) -> set[int]:
        """Answer the owner's requests: fill `view`, of the segment's size, with the found chunks, and return them.

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
        """Copy the chunk from a source that has it. The digest is checked after the copy, because sources may change."""
        for candidate in self._candidates:
            if not candidate.hits and candidate.misses >= _PROBES:
                continue
            if candidate.memory is None:
                candidate.memory = candidate.open()
            if candidate.memory is None or candidate.memory.nbytes < where[1]:
                candidate.misses += 1
                continue
            with view[slice(*where)] as target:
                if _read(candidate.memory.fd, where, target) == digest:
                    candidate.hits += 1
                    self._candidates.remove(candidate)  # is searched first from now on
                    self._candidates.insert(0, candidate)
                    return True
            candidate.misses += 1
        return False


def _read(fd: int, where: Range, target: memoryview) -> bytes:
    """Read a range of a file into `target`; return its digest. Raises OSError if the file is too short."""
    begin, end = where
    with target[: end - begin] as part:
        at = 0
        while at < len(part):
            count = os.preadv(fd, [part[at:]], begin + at)
            if count == 0:
                raise OSError(f"a segment ends at byte {begin + at}, {end - begin - at} bytes early")
            at += count
        return hashlib.sha256(part).digest()[:_DIGEST_BYTES]
