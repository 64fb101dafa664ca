"""Segments: memory files that outlive the worker that writes them. No torch.

A *slot* holds one snapshot: a header page, the bytes of its tensors, then small values, then a JSON manifest that says
where everything is. A *blob* holds one byte string (a transcript). Both are memfds, made by the agent and kept open by
it, so that nothing is left on a disk and nothing is bound by the size of /dev/shm.

A writer says *busy* in the header before the first byte changes and *complete* after the last one; the digests tell a
header or a manifest that is not whole. The bytes of a slot are `[0, header.used_bytes)`, which is what is to be sent to
copy a snapshot elsewhere. A header is never the same twice, so that whoever reads a slot while its worker may be
overwriting it compares the header before with that after.
"""

import fcntl
import hashlib
import json
import os
import struct
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import IntEnum, StrEnum
from typing import Any

from deadpool_run.errors import SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.status_page import BUSY, EMPTY, RankEntry

FORMAT = 2
HEADER_BYTES = 4096
"""The first byte behind the header: a page of its own, so that the tensors begin on a page."""
ALIGNMENT = 64
"""Of every tensor's offset: a cache line, and a multiple of every element size."""
MAX_MANIFEST_BYTES = 1 << 30

_SLOT_MAGIC = b"deadslot"
_BLOB_MAGIC = b"deadblob"
_DIGEST_BYTES = 16
_SLOT = struct.Struct(f"<8sIIqQQQ{_DIGEST_BYTES}s")
_BLOB = struct.Struct(f"<8sIIQ{_DIGEST_BYTES}s")
_HEAD_BYTES = _SLOT.size + _DIGEST_BYTES
_WRITE_BYTES = 1 << 30


class SegmentState(IntEnum):
    """What a header says of its segment."""

    EMPTY = 0
    BUSY = 1
    COMPLETE = 2


class SlotRole(StrEnum):
    """What a tensor of a snapshot is."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPTIMIZER = "optimizer"
    VALUE = "value"  # part of a value: its name is its place among the values' tensors


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a shard belongs: the words of DTensor. `at` is the shard's coordinate in a mesh of shape `mesh`."""

    mesh: tuple[int, ...]
    names: tuple[str, ...] | None
    at: tuple[int, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]
    """Of the whole tensor, as is `stride`."""
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor (of a DTensor its local shard) and where its bytes are.

    `shape` and `stride` count elements; the element with all indices 0 is at `offset`, and `nbytes` bytes hold all.
    `device` is a device's type ("cpu", "cuda"): a replacement may sit on another device of that type.
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
    """What a slot holds: tensors, byte strings (as offset and length), and a JSON tree that refers to both by index."""

    version: Version
    rank: Rank
    tensors: tuple[TensorEntry, ...]
    value_tensors: tuple[TensorEntry, ...]
    blobs: tuple[tuple[int, int], ...]
    values: dict[str, Any]

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the offset and length of every piece that the manifest names."""
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
    """Grows with each header that is written; begins at the clock, so that two slots' headers are never the same."""

    @property
    def used_bytes(self) -> int:
        """The manifest comes last, so that the slot is all the bytes up to its end."""
        return self.manifest_offset + self.manifest_bytes


def digest_of(data: bytes | memoryview) -> bytes:
    """Return the digest that headers use (BLAKE2b, RFC 7693, 16 bytes)."""
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def aligned(offset: int) -> int:
    """Return the next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def create_memory(name: str) -> int:
    """Return the descriptor of a new memory file of no bytes, which may grow and never shrinks.

    Whoever has it mapped would be ended by the kernel if another process cut it short.
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
            raise SnapshotError(f"a segment ends at byte {offset}, {nbytes} bytes early")
        parts.append(part)
        nbytes, offset = nbytes - len(part), offset + len(part)
    return b"".join(parts)


# --- slots -------------------------------------------------------------------------------------------------------


def write_header(fd: int, header: SlotHeader) -> None:
    """Replace the slot's header; how often it was written is counted here."""
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


def mark_busy(fd: int) -> None:
    """Say that the slot's bytes are about to change."""
    write_header(fd, SlotHeader(SegmentState.BUSY, BUSY))


def mark_empty(fd: int) -> None:
    """Say that the slot holds nothing."""
    write_header(fd, SlotHeader(SegmentState.EMPTY, EMPTY))


def read_header(fd: int) -> SlotHeader | None:
    """Return the slot's header; None if there is none that is whole and of this format."""
    return parse_header(os.pread(fd, _HEAD_BYTES, 0), os.fstat(fd).st_size)


def read_identified(fd: int) -> tuple[SlotHeader | None, bytes]:
    """Return the slot's header as `read_header` does, and its `identity`, both of one moment."""
    head = os.pread(fd, _HEAD_BYTES, 0)
    return parse_header(head, os.fstat(fd).st_size), head[_SLOT.size :]


def parse_header(head: bytes, size: int) -> SlotHeader | None:
    """Return the header that a slot of `size` bytes begins with; None if it is not whole or not of this format."""
    body = head[: _SLOT.size]
    if len(head) < _HEAD_BYTES or digest_of(body) != head[_SLOT.size : _HEAD_BYTES]:
        return None
    magic, form, state, version, offset, nbytes, writes, digest = _SLOT.unpack(body)
    if magic != _SLOT_MAGIC or form != FORMAT or state not in iter(SegmentState):
        return None
    if nbytes > MAX_MANIFEST_BYTES or offset + nbytes > size:
        return None
    return SlotHeader(SegmentState(state), version, offset, nbytes, digest, writes)


def identity(fd: int) -> bytes:
    """Return what tells a complete slot's content from any other that ever was: its header's digest."""
    return os.pread(fd, _DIGEST_BYTES, _SLOT.size)


def manifest_is_whole(fd: int, header: SlotHeader) -> bool:
    """Tell whether the manifest has the digest that the header says. Raises `SnapshotError` if the file is too short."""
    return digest_of(read_exactly(fd, header.manifest_bytes, header.manifest_offset)) == header.digest


def complete_version(fd: int) -> Version | None:
    """Return the version that the slot's header says it holds complete, if any. The status page must agree with it."""
    header = read_header(fd)
    if header is None or header.state is not SegmentState.COMPLETE:
        return None
    return Version(header.version)


def complete_versions(fds: Sequence[int], rank_entry: RankEntry) -> tuple[Version, ...]:
    """Return, oldest first, the versions that both the status page and the slots' headers call complete."""
    both = zip(fds, rank_entry.slots, strict=True)
    return tuple(sorted(Version(said) for fd, said in both if said >= 0 and complete_version(fd) == said))


def free_slot(
    slots: Sequence[int], committed: Version | None, abandoned: Collection[int], kept: int = EMPTY
) -> int | None:
    """Return the slot that may be overwritten, the one with the oldest version first; None if neither may.

    A slot whose version is at or above the newest committed one is needed: a peer may yet die and leave that version
    as the only one that all have. An abandoned one, which some rank will never hold, is not, provided that it is above
    the committed one: that is held by all, so that it was abandoned before a rollback and has been made again.
    A `kept` version (`Board.kept`) is not overwritten either.
    """
    newest = EMPTY if committed is None else committed
    free = [
        (version, slot)
        for slot, version in enumerate(slots)
        if version < 0 or (version != kept and (version < newest or (version > newest and version in abandoned)))
    ]
    return min(free)[1] if free else None


def encode_entries(entries: Sequence[TensorEntry]) -> bytes:
    """Return the JSON of tensor entries; the same entries stay the same bytes, so a writer may keep them."""
    return json.dumps([asdict(entry) for entry in entries], separators=(",", ":")).encode()


def encode_manifest(  # noqa: PLR0913 - the parts of a manifest
    *,
    version: Version,
    rank: Rank,
    tensors: bytes,
    value_tensors: bytes,
    blobs: Sequence[tuple[int, int]],
    values: dict[str, Any],
) -> bytes:
    """Return a manifest as JSON; `tensors` and `value_tensors` come from `encode_entries`."""
    rest = {"version": version, "rank": rank, "blobs": blobs, "values": values}
    body = json.dumps(rest, separators=(",", ":"), allow_nan=False).encode()
    return b'{"tensors":' + tensors + b',"value_tensors":' + value_tensors + b"," + body[1:]


def read_manifest(fd: int, version: Version) -> Manifest:
    """Return the manifest of the slot, which must hold `version` complete. Raises `SnapshotError`."""
    header = read_header(fd)
    if header is None or header.state is not SegmentState.COMPLETE or header.version != version:
        raise SnapshotError(f"the slot does not hold snapshot {version} complete: its header says {header}")
    return parse_manifest(read_exactly(fd, header.manifest_bytes, header.manifest_offset), header)


def parse_manifest(body: bytes, header: SlotHeader) -> Manifest:
    """Return the manifest that a slot with this header has as `body`. Raises `SnapshotError`."""
    version = header.version
    if digest_of(body) != header.digest:
        raise SnapshotError(f"the manifest of snapshot {version} does not have the digest that its header says")
    try:
        parts = json.loads(body)
        manifest = Manifest(
            version=Version(parts["version"]),
            rank=Rank(parts["rank"]),
            tensors=tuple(map(_entry, parts["tensors"])),
            value_tensors=tuple(map(_entry, parts["value_tensors"])),
            blobs=tuple((offset, nbytes) for offset, nbytes in parts["blobs"]),
            values=dict(parts["values"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SnapshotError(f"the manifest of snapshot {version} is not of format {FORMAT}") from error
    for offset, nbytes in manifest.ranges():
        if offset < HEADER_BYTES or nbytes < 0 or offset + nbytes > header.manifest_offset:
            raise SnapshotError(f"the manifest of snapshot {version} names bytes outside of its slot")
    return manifest


def _entry(parts: dict[str, Any]) -> TensorEntry:
    """Return an entry from its JSON."""
    placement = parts["placement"]
    if placement is not None:
        names = placement["names"]
        placement = Placement(
            mesh=tuple(placement["mesh"]),
            names=None if names is None else tuple(names),
            at=tuple(placement["at"]),
            placements=tuple(placement["placements"]),
            shape=tuple(placement["shape"]),
            stride=tuple(placement["stride"]),
        )
    shape, stride = tuple(parts["shape"]), tuple(parts["stride"])
    changed = {"role": SlotRole(parts["role"]), "shape": shape, "stride": stride, "placement": placement}
    return TensorEntry(**(parts | changed))


# --- blobs -------------------------------------------------------------------------------------------------------


def write_blob(fd: int, data: bytes) -> None:
    """Replace what the blob segment holds; a writer that dies on the way leaves it empty."""
    _write_blob_header(fd, SegmentState.BUSY, b"")
    write_all(fd, data, HEADER_BYTES)
    _write_blob_header(fd, SegmentState.COMPLETE, data)


def blob_bytes(fd: int) -> int | None:
    """Return the size of the segment up to its blob's end, or None if its header says that it holds none."""
    head = os.pread(fd, _BLOB.size, 0)
    if len(head) < _BLOB.size:
        return None
    magic, form, state, nbytes, _ = _BLOB.unpack(head)
    if magic != _BLOB_MAGIC or form != FORMAT or state != SegmentState.COMPLETE:
        return None
    return HEADER_BYTES + nbytes if HEADER_BYTES + nbytes <= os.fstat(fd).st_size else None


def blob_identity(fd: int) -> bytes:
    """Return what tells a complete blob from any other: the digest of its content."""
    return os.pread(fd, _DIGEST_BYTES, _BLOB.size - _DIGEST_BYTES)


def read_blob(fd: int) -> bytes | None:
    """Return what the blob segment holds, or None if it holds nothing whole."""
    end = blob_bytes(fd)
    if end is None:
        return None
    digest = blob_identity(fd)
    data = read_exactly(fd, end - HEADER_BYTES, HEADER_BYTES)
    return data if digest_of(data) == digest else None


def _write_blob_header(fd: int, state: SegmentState, data: bytes) -> None:
    write_all(fd, _BLOB.pack(_BLOB_MAGIC, FORMAT, state, len(data), digest_of(data)), 0)
