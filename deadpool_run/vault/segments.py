"""Segments: memory files that outlive the worker that writes them. No torch.

A *slot* holds one snapshot: a header page, the bytes of its tensors, small values, and a JSON manifest with the place of
everything. A *blob* holds one byte string (a transcript), with a header like a slot's. Both are memfds that the agent creates and keeps open, so that
nothing stays on a disk, and the size of /dev/shm is no limit.

A writer sets the header to *busy* before the first byte changes, and to *complete* after the last. Digests detect an
incomplete header or manifest. The bytes of a slot are `[0, header.used_bytes)`; a copy of the snapshot sends those. No two
headers have the same token, so that a reader detects an overwritten slot by comparing the token before and after.
"""

import fcntl
import hashlib
import json
import mmap
import os
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from deadpool_run.errors import ProtocolError, SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.status_page import BUSY, EMPTY
from deadpool_run.wire.typed import from_plain, parse

FORMAT = 2
HEADER_BYTES = 4096
"""The header takes a page, so that the tensors begin on a page."""
ALIGNMENT = 64
"""Of every tensor's offset: a cache line, and a multiple of every element size."""
MAX_MANIFEST_BYTES = 1 << 30

_SLOT_MAGIC = b"deadslot"
_DIGEST_BYTES = 16
_SLOT = struct.Struct(f"<8sIIqQQQ{_DIGEST_BYTES}s")
_OF_BLOB = -3
"""In place of the version, in the header of a blob."""
_HEAD_BYTES = _SLOT.size + _DIGEST_BYTES
_WRITE_BYTES = 1 << 30


class SegmentState(IntEnum):
    """The state of a segment in its header."""

    EMPTY = 0
    BUSY = 1
    COMPLETE = 2


class SlotRole(StrEnum):
    """The role of a tensor in a snapshot."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    VALUE = "value"  # part of a value: its name is its index among the values' tensors


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a DTensor's shard. `at` is its coordinate in a mesh of shape `mesh`."""

    mesh: tuple[int, ...]
    names: tuple[str, ...] | None
    at: tuple[int, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    """Of the whole tensor, as is `stride`."""
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor (of a DTensor its local shard) and the place of its bytes.

    `shape` and `stride` count elements. The element with all indices 0 is at `offset`; all are within `nbytes` bytes.
    `device` is a device type ("cpu", "cuda"): a replacement may use another device of that type.
    """

    name: str
    role: SlotRole
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    device: str
    offset: int
    nbytes: int
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of a slot: tensors, byte strings (offset and length), and a JSON tree that refers to both by index."""

    version: Version
    rank: Rank
    tensors: tuple[TensorEntry, ...]
    value_tensors: tuple[TensorEntry, ...]
    blobs: tuple[tuple[int, int], ...]
    values: dict[str, Any]

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the offset and length of every tensor and byte string."""
        for entry in (*self.tensors, *self.value_tensors):
            yield entry.offset, entry.nbytes
        yield from self.blobs


@dataclass(frozen=True, slots=True)
class SlotHeader:
    """The first bytes of a slot."""

    state: SegmentState
    version: int
    manifest_offset: int = 0
    manifest_bytes: int = 0
    digest: bytes = b""
    """Of the manifest: BLAKE2b of 16 bytes."""
    writes: int = field(default=0, compare=False)
    """Grows with each written header. Starts at the clock, so that headers of two slots never have the same token."""
    token: bytes = field(default=b"", compare=False)
    """Digest of the written header, which identifies the content of a complete slot."""

    @property
    def used_bytes(self) -> int:
        """The size of the slot up to the end of the manifest, which comes last."""
        return self.manifest_offset + self.manifest_bytes


def digest_of(data: bytes | memoryview) -> bytes:
    """Return the digest that headers use (BLAKE2b, RFC 7693, 16 bytes)."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def aligned(offset: int) -> int:
    """Return the next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def whole_pages(nbytes: int) -> int:
    """Round up to a multiple of the page size."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def create_memory(name: str) -> int:
    """Return the descriptor of a new, empty memory file that can grow and not shrink.

    The kernel would kill a process that has it mapped if another process truncated it.
    """
    fd = os.memfd_create(f"deadpool-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return fd


def write_all(fd: int, data: bytes, offset: int) -> None:
    """Write `data` at `offset`, growing the file as needed."""
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view[:_WRITE_BYTES], offset)
        view, offset = view[count:], offset + count


def read_exactly(fd: int, nbytes: int, offset: int) -> bytes:
    """Return `nbytes` bytes at `offset`. Raises `SnapshotError` if the file ends before."""
    parts = []
    while nbytes:
        part = os.pread(fd, min(nbytes, _WRITE_BYTES), offset)
        if not part:
            raise SnapshotError(f"a segment ends at byte {offset}: {nbytes} bytes are missing")
        parts.append(part)
        nbytes, offset = nbytes - len(part), offset + len(part)
    return b"".join(parts)


# --- slots -------------------------------------------------------------------------------------------------------


def write_header(fd: int, header: SlotHeader) -> None:
    """Replace the slot's header, and increment `writes`."""
    before = read_header(fd)
    writes = max(time.monotonic_ns(), 0 if before is None else before.writes + 1)
    body = _SLOT.pack(
        _SLOT_MAGIC,
        FORMAT,
        header.state,
        header.version,
        header.manifest_offset,
        header.manifest_bytes,
        writes,
        header.digest,
    )
    write_all(fd, body + digest_of(body), 0)


def complete_header(version: int, offset: int, manifest: bytes) -> SlotHeader:
    """Return the header of a complete slot whose manifest is at the offset."""
    return SlotHeader(SegmentState.COMPLETE, version, offset, len(manifest), digest_of(manifest))


def mark_busy(fd: int) -> None:
    """Mark the slot busy, before its bytes change."""
    write_header(fd, SlotHeader(SegmentState.BUSY, BUSY))


def mark_empty(fd: int) -> None:
    """Mark the slot empty."""
    write_header(fd, SlotHeader(SegmentState.EMPTY, EMPTY))


def read_header(fd: int) -> SlotHeader | None:
    """Return the slot's header; None if it is damaged or of another format."""
    return parse_header(os.pread(fd, _HEAD_BYTES, 0), os.fstat(fd).st_size)


def read_complete(fd: int, version: int) -> SlotHeader | None:
    """Return the slot's header; None unless it says that the slot holds this version complete."""
    header = read_header(fd)
    whole = header is not None and header.state is SegmentState.COMPLETE and header.version == version
    return header if whole else None


def parse_header(head: bytes, size: int) -> SlotHeader | None:
    """Return the header of a slot of `size` bytes; None if it is damaged or of another format."""
    body, token = head[: _SLOT.size], head[_SLOT.size : _HEAD_BYTES]
    if len(head) < _HEAD_BYTES or digest_of(body) != token:
        return None
    magic, form, state, version, offset, nbytes, writes, digest = _SLOT.unpack(body)
    if magic != _SLOT_MAGIC or form != FORMAT or state not in iter(SegmentState):
        return None
    if nbytes > MAX_MANIFEST_BYTES or offset + nbytes > size:
        return None
    return SlotHeader(SegmentState(state), version, offset, nbytes, digest, writes, token)


def slot_token(fd: int) -> bytes:
    """Return the token of the slot's header, whatever the header says."""
    return os.pread(fd, _DIGEST_BYTES, _SLOT.size)


def manifest_is_whole(fd: int, header: SlotHeader) -> bool:
    """Return whether the manifest has the header's digest. Raises `SnapshotError` if the file is too short."""
    return digest_of(read_exactly(fd, header.manifest_bytes, header.manifest_offset)) == header.digest


def complete_version(fd: int) -> Version | None:
    """Return the complete version according to the slot's header, if any. The status page has to agree."""
    header = read_header(fd)
    if header is None or header.state is not SegmentState.COMPLETE:
        return None
    return Version(header.version)


def free_slot(
    slots: Sequence[int], committed: Version | None, abandoned: Collection[int], kept: int = EMPTY
) -> int | None:
    """Return the slot to overwrite, with the oldest version; None if neither may be overwritten.

    A version at or above the newest committed one is needed: if a peer dies, it may be the only one that all ranks have.
    An abandoned version above the committed one is not needed, because some rank will never hold it. (The committed version
    may be listed as abandoned too, from before a rollback.) A `kept` version (`StatusPage.kept`) is not overwritten.
    """
    newest = EMPTY if committed is None else committed
    free = [
        (version, slot)
        for slot, version in enumerate(slots)
        if version < 0 or (version != kept and (version < newest or (version > newest and version in abandoned)))
    ]
    return min(free)[1] if free else None


def encode_manifest(  # noqa: PLR0913 - the parts of a manifest
    *,
    version: Version,
    rank: Rank,
    tensors: bytes,
    value_tensors: bytes,
    blobs: Sequence[tuple[int, int]],
    values: dict[str, Any],
) -> bytes:
    """Return a manifest as JSON; `tensors` and `value_tensors` are the JSON of tensor entries, which a writer may use again."""
    rest = {"version": version, "rank": rank, "blobs": blobs, "values": values}
    body = json.dumps(rest, separators=(",", ":"), allow_nan=False).encode()
    return b'{"tensors":' + tensors + b',"value_tensors":' + value_tensors + b"," + body[1:]


def read_manifest(fd: int, version: Version) -> Manifest:
    """Return the manifest of the slot. Raises `SnapshotError` if the slot does not hold `version` complete."""
    header = read_complete(fd, version)
    if header is None:
        raise SnapshotError(f"the slot does not hold a complete snapshot {version}: its header is {read_header(fd)}")
    return parse_manifest(read_exactly(fd, header.manifest_bytes, header.manifest_offset), header)


def parse_manifest(body: bytes, header: SlotHeader) -> Manifest:
    """Return the manifest encoded in `body`, of a slot with this header. Raises `SnapshotError`."""
    version = header.version
    if digest_of(body) != header.digest:
        raise SnapshotError(f"the manifest of snapshot {version} is damaged: its digest is not the one in the header")
    try:
        manifest = from_plain(Manifest, parse(body))
    except ProtocolError as error:
        raise SnapshotError(f"the manifest of snapshot {version} is not of format {FORMAT}") from error
    for offset, nbytes in manifest.ranges():
        if offset < HEADER_BYTES or nbytes < 0 or offset + nbytes > header.manifest_offset:
            raise SnapshotError(f"the manifest of snapshot {version} refers to bytes outside of its slot")
    return manifest


# --- blobs -------------------------------------------------------------------------------------------------------


def write_blob(fd: int, data: bytes) -> None:
    """Replace the blob; a writer that dies half-way leaves none."""
    mark_busy(fd)
    write_all(fd, data, HEADER_BYTES)
    write_header(fd, complete_header(_OF_BLOB, HEADER_BYTES, data))


def blob_header(fd: int) -> tuple[int, bytes] | None:
    """Return the size of the segment up to its blob's end, and the blob's digest; None if it holds no blob."""
    header = read_complete(fd, _OF_BLOB)
    return None if header is None else (header.used_bytes, header.digest)


def read_blob(fd: int) -> bytes | None:
    """Return the blob; None if there is no complete one."""
    header = read_complete(fd, _OF_BLOB)
    if header is None:
        return None
    data = read_exactly(fd, header.manifest_bytes, HEADER_BYTES)
    return data if digest_of(data) == header.digest else None
