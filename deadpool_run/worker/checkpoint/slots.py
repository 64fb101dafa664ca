"""Copies of committed slots, taken while training goes on, and slots filled from a checkpoint."""

import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.segments import Manifest, SlotHeader, TensorEntry
from deadpool_run.vault.status_page import EMPTY, StatusPage
from deadpool_run.worker.snapshot.slot_memory import tensor_at

Slots = Mapping[Rank, tuple[int, int]]
"""The descriptors of each rank's slots."""

_READ_BYTES = 1 << 28
THREADS = 4


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """A consistent copy of one rank's slot."""

    rank: Rank
    memory: mmap.mmap
    header: SlotHeader
    manifest: Manifest

    def view(self, entry: TensorEntry) -> Tensor:
        """Return a tensor of the manifest."""
        return tensor_at(torch.frombuffer(self.memory, dtype=torch.uint8), entry)

    def raw(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the slot."""
        return self.memory[offset : offset + nbytes]


def rooms(slots: Slots) -> dict[Rank, mmap.mmap]:
    """Allocate memory for a copy of either slot of each rank, with every page present: the copy itself must be quick."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    sizes = {rank: max(os.fstat(fd).st_size for fd in pair) for rank, pair in slots.items()}
    return {rank: mmap.mmap(-1, max(segments.HEADER_BYTES, size), flags=flags) for rank, size in sizes.items()}


def copy_kept(
    status_page: StatusPage, slots: Slots, version: Version, memories: dict[Rank, mmap.mmap]
) -> list[SlotCopy] | None:
    """Copy this version of these ranks, then release it: the status page has it as kept. None if it is not there."""
    entries = [status_page.rank_entries[rank] for rank in slots]

    def owners() -> list[tuple[int, int]]:
        return [(entry.worker, entry.epoch) for entry in entries]

    def copy(rank: Rank) -> SlotCopy | None:
        held = status_page.rank_entries[rank].slots
        return _copy(memories, rank, slots[rank][held.index(version)], version) if version in held else None

    try:
        before = owners()
        with ThreadPoolExecutor(THREADS) as pool:
            copies = [copied for copied in pool.map(copy, slots) if copied is not None]
        # After a rollback, a version of the same number is another one.
        return copies if len(copies) == len(slots) and before == owners() else None
    finally:
        status_page.kept = EMPTY


def _copy(memories: dict[Rank, mmap.mmap], rank: Rank, fd: int, version: Version) -> SlotCopy | None:
    """Copy one slot; None if it did not hold the version all the time."""
    before = segments.read_complete(fd, version)
    if before is None:
        return None
    if before.used_bytes > len(memories[rank]):  # the slot has grown since
        memories[rank] = mmap.mmap(-1, before.used_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    target = memoryview(memories[rank])
    done = segments.HEADER_BYTES
    while done < before.used_bytes:
        count = os.preadv(fd, [target[done : min(done + _READ_BYTES, before.used_bytes)]], done)
        if count == 0:
            return None
        done += count
    if segments.slot_token(fd) != before.token:
        return None
    manifest = segments.parse_manifest(memories[rank][before.manifest_offset : before.used_bytes], before)
    return SlotCopy(rank, memories[rank], before, manifest)


class Filling:
    """A slot that is being filled with a snapshot, until `complete`."""

    def __init__(self, fd: int, manifest_offset: int, manifest: bytes, version: Version) -> None:
        """Mark the slot busy, and make it large enough. Raises `SnapshotError`."""
        segments.mark_busy(fd)
        self._fd = fd
        self._header = segments.complete_header(version, manifest_offset, manifest)
        self._bytes = manifest
        self.manifest = segments.parse_manifest(manifest, self._header)
        os.ftruncate(fd, max(os.fstat(fd).st_size, self._header.used_bytes))
        self._memory = mmap.mmap(fd, self._header.used_bytes)
        self._base = torch.frombuffer(self._memory, dtype=torch.uint8)

    def put(self, entry: TensorEntry, tensor: Tensor) -> bytes:
        """Copy a tensor of the same shape and dtype; return the digest of its bytes."""
        tensor_at(self._base, entry).copy_(tensor)
        return segments.digest_of(memoryview(self._memory)[entry.offset : entry.offset + entry.nbytes])

    def complete(self, tail_offset: int, tail: bytes) -> None:
        """Write everything except tensors, and mark the slot complete."""
        segments.write_all(self._fd, tail, tail_offset)
        segments.write_all(self._fd, self._bytes, self._header.manifest_offset)
        segments.write_header(self._fd, self._header)
