"""Chunks of segments, and their keyed digests: 16 bytes of BLAKE3 under keys that only the job's agents have.

One digest serves three purposes. Equal digests show that a peer has a chunk already. A received chunk that has another digest
was damaged on its way. And only the key makes a digest that fits. The *root digest* of a segment is a digest of all its
chunks' digests, in order, and of what the segment is: a genuine chunk is of no use in another place.
"""

import threading
import time
from collections.abc import Iterable

from blake3 import blake3

from deadpool_run.ids import Rank, Version
from deadpool_run.vault.segments import HEADER_BYTES

CHUNK_BYTES = 256 << 10
"""Small, so that the different bytes at a snapshot's end cost little, and a core's cache holds a chunk."""
BLOCK_CHUNKS = 16
DIGEST_BYTES = 16

Range = tuple[int, int]
"""The first byte, and the first byte after the range."""


def range_of(number: int) -> Range:
    """Return the place of a chunk that is not the last of its segment."""
    return (HEADER_BYTES + (number - 1) * CHUNK_BYTES if number else 0), HEADER_BYTES + number * CHUNK_BYTES


def number_of(chunk: Range) -> int:
    """Return a chunk's number in its segment."""
    return 1 + (chunk[0] - HEADER_BYTES) // CHUNK_BYTES if chunk[0] else 0


class Hasher:
    """Computes digests under keys that are derived from the job's secret, each for its purpose."""

    def __init__(self, secret: bytes) -> None:
        self._chunk_key = blake3(secret, derive_key_context="deadpool-run vault 1: chunks").digest()
        self._root_key = blake3(secret, derive_key_context="deadpool-run vault 1: roots").digest()

    def chunk(self, data: memoryview) -> bytes:
        """Return the digest of a chunk. Other threads run meanwhile."""
        return blake3(data, key=self._chunk_key).digest(DIGEST_BYTES)

    def root(self, parts: Iterable[bytes]) -> bytes:
        """Return the digest of what a segment is, and of its chunks' digests."""
        return blake3(b"".join(parts), key=self._root_key).digest(DIGEST_BYTES)


class ChunkDigests:
    """The digests of one segment's chunks, as far as they are known. Thread-safe.

    The header is a chunk of its own. A *block* is a group of consecutive chunks.
    """

    def __init__(self, hasher: Hasher, rank: Rank, version: Version | None, token: bytes, nbytes: int) -> None:
        self.hasher, self.token, self.nbytes = hasher, token, nbytes
        self._name = f"{rank} {version} {nbytes} ".encode() + token
        self.chunks = 1 + max(0, -(-(nbytes - HEADER_BYTES) // CHUNK_BYTES))
        self.blocks = -(-self.chunks // BLOCK_CHUNKS)
        self._digests: list[bytes] = [b""] * self.blocks
        self._locks = [threading.Lock() for _ in range(self.blocks)]
        self.hashed_s = 0.0
        """The time for which threads computed digests, together."""
        self.places: dict[bytes, int] = {}
        """The first byte of a chunk with this digest."""

    def block(self, number: int) -> list[Range]:
        """Return the chunks of a block."""
        first = number * BLOCK_CHUNKS
        last = min(first + BLOCK_CHUNKS, self.chunks)
        return [(begin, min(end, self.nbytes)) for begin, end in map(range_of, range(first, last))]

    def of_block(self, number: int, view: memoryview) -> bytes:
        """Return the digests of a block of `view`, one after the other. They are computed once."""
        with self._locks[number]:
            if not self._digests[number]:
                began = time.monotonic()
                self.put(number, self._hashed(number, view))
                self.hashed_s += time.monotonic() - began
            return self._digests[number]

    def _hashed(self, number: int, view: memoryview) -> bytes:
        digests = []
        for begin, end in self.block(number):
            with view[begin:end] as part:
                digests.append(self.hasher.chunk(part))
        return b"".join(digests)

    def are_known(self) -> bool:
        """Return whether all were computed or noted."""
        return all(self._digests)

    def fit(self, view: memoryview) -> bool:
        """Return whether the chunks in `view` are still those of the digests, as far as these are known."""
        return all(not known or self._hashed(number, view) == known for number, known in enumerate(self._digests))

    def put(self, number: int, digests: bytes) -> None:
        """Note the digests of a block."""
        self._digests[number] = digests
        self.places.update(zip(split(digests), (begin for begin, _ in self.block(number)), strict=True))

    def root(self, part: int, of: int) -> bytes:
        """Return the root digest of every of-th block, from block `part` on."""
        return self.hasher.root([self._name, f" {part} {of} ".encode(), *self._digests[part::of]])


def split(digests: bytes) -> list[bytes]:
    """Return the single digests."""
    return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
