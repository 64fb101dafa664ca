"""The mapped memory of a snapshot slot, and its bytes seen as tensors."""

import ctypes
import errno
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from deadpool_run.errors import NoMemoryError, SnapshotError
from deadpool_run.text import size
from deadpool_run.vault.headroom import Growth
from deadpool_run.vault.segments import TensorEntry, whole_pages
from deadpool_run.worker.compat.modules import copy_all

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_POPULATED_BYTES = 16 << 20
"""Populated by one call. While it runs, other threads' allocations of memory wait."""
_SMALL_BYTES = 16 << 20
"""For less, the start of a thread takes longer than the thread saves."""
_MOST_THREADS = 4
"""A few threads use all of a machine's memory bandwidth."""
_LIBC = ctypes.CDLL(None, use_errno=True)


class SlotMemory:
    """The mapped bytes of one slot. Holds a duplicate of the given descriptor."""

    def __init__(self, fd: int, growth: Growth) -> None:
        self.fd = os.dup(fd)
        self._growth = growth
        self.mapping_version = 0
        """Grows when the slot is mapped again. Views of an older mapping show memory that no longer belongs to the slot;
        they keep that memory alive, so that using one does not crash."""
        self._base: Tensor | None = None
        self._pinned: bool | None = None
        """Whether CUDA has registered the mapping; None: not tried."""
        self._mapping_ahead: threading.Thread | None = None

    def map_ahead(self, after: threading.Thread | None = None) -> threading.Thread | None:
        """Begin to map what the slot has now, on a thread that waits for `after` first; return the thread; None for a small slot.

        A restore or capture that comes soon finds it done, or waits for it.
        """
        if os.fstat(self.fd).st_size < _SMALL_BYTES:
            return None
        self._mapping_ahead = threading.Thread(
            target=self._map_present, args=(after,), name="deadpool-map", daemon=True
        )
        self._mapping_ahead.start()
        return self._mapping_ahead

    def ensure(self, nbytes: int, *, pin_for: torch.device | None = None) -> None:
        """Map at least `nbytes` bytes, growing the file if it is smaller; register them for copies from a CUDA device.

        Raises `NoMemoryError` if there is no memory to grow.
        """
        self._settle()
        if self._base is None or self._base.numel() < nbytes:
            self._unpin()
            self._base = self._mapped(nbytes)
            self.mapping_version += 1
        if pin_for is not None and self._pinned is None:
            # 1: portable, for every device. Without registration copies are slower, but still right.
            with torch.cuda.device(pin_for):  # else this thread would open a context on the first device
                result = torch.cuda.cudart().cudaHostRegister(self._base.data_ptr(), self._base.numel(), 1)
            self._pinned = int(result) == 0
            if not self._pinned:
                _clear_cuda_error()

    def view(self, entry: TensorEntry) -> Tensor:
        """Return the entry's bytes as a tensor of its dtype, shape and stride."""
        assert self._base is not None
        return tensor_at(self._base, entry)

    def close(self) -> None:
        """Close our descriptor and unmap, once the last view is gone. The slot keeps its content."""
        self._settle()
        self._unpin()
        self._base = None
        os.close(self.fd)

    def _map_present(self, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        present = os.fstat(self.fd).st_size
        with suppress(NoMemoryError, OSError):  # `ensure` tries again, and raises
            if present:
                self._base = self._map(present)
                self.mapping_version += 1

    def _settle(self) -> None:
        if self._mapping_ahead is not None:
            self._mapping_ahead.join()
            self._mapping_ahead = None

    def _mapped(self, nbytes: int) -> Tensor:
        present = os.fstat(self.fd).st_size
        wanted = max(whole_pages(nbytes), present)
        if wanted == present:
            return self._map(wanted)
        with self._growth.by(wanted - present, f"a snapshot of {size(nbytes)}"):
            os.ftruncate(self.fd, wanted)
            return self._map(wanted)

    def _map(self, nbytes: int) -> Tensor:
        base = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)  # keeps the mapping alive
        _populate(base)
        return base

    def _unpin(self) -> None:
        if self._pinned and self._base is not None:
            result = torch.cuda.cudart().cudaHostUnregister(self._base.data_ptr())
            if int(result):
                _clear_cuda_error()
        self._pinned = None


def _clear_cuda_error() -> None:
    """Clear the error that a failed call has left in CUDA's runtime: torch would report it after this thread's next kernel.

    Torch has no function for that. It loads the runtime's symbols for the whole process.
    """
    if clear := getattr(_LIBC, "cudaGetLastError", None):
        clear()


def _populate(base: Tensor) -> None:
    """Have the kernel allocate every page now: a first touch costs ten times a copy, and no capture should pay for it.

    Through ctypes, because `mmap.madvise` would hold the interpreter's lock all the time.
    """
    start, nbytes = base.data_ptr(), base.numel()
    # Only a hint: some kernels have no huge pages for shared memory.
    _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)
    for offset in range(0, nbytes, _POPULATED_BYTES):
        part = ctypes.c_size_t(min(_POPULATED_BYTES, nbytes - offset))
        if _LIBC.madvise(ctypes.c_void_p(start + offset), part, _MADV_POPULATE_WRITE) == 0:
            continue
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOSYS):  # an older kernel: pages are allocated at first touch
            return
        raise NoMemoryError(f"no memory for a snapshot of {size(nbytes)}: {os.strerror(number)}")


def tensor_at(base: Tensor, entry: TensorEntry) -> Tensor:
    """Return the entry's bytes in `base`, the bytes of a slot, as a tensor of its dtype, shape and stride."""
    flat = base[entry.offset : entry.offset + entry.nbytes].view(dtype_of(entry.dtype))
    return flat.as_strided(entry.shape, entry.stride, flat.storage_offset())


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that a manifest names. Raises `SnapshotError`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SnapshotError(f"a snapshot names {name!r}, which is not a dtype of torch {torch.__version__}")
    return dtype


def copy_each(targets: list[Tensor], sources: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source into its target, in one call that holds the interpreter's lock only at its start."""
    if targets:
        with torch.no_grad():
            copy_all(targets, sources, non_blocking=non_blocking)


def copy_fast(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target, on several threads if no device is involved: when cores have nothing else to do."""
    on_device = any(target.device.type != "cpu" for target in targets)
    is_small = sum(source.nbytes for source in sources) < _SMALL_BYTES
    threads = 1 if on_device or is_small else min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    if threads == 1:
        copy_each(targets, sources)
        return
    shares: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in range(threads)]
    nbytes = [0] * threads
    for target, source in zip(targets, sources, strict=True):
        least = nbytes.index(min(nbytes))
        nbytes[least] += source.nbytes
        shares[least][0].append(target)
        shares[least][1].append(source)
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(copy_each, *share) for share in shares]:
            done.result()
