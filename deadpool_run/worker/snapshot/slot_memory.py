"""The mapped memory of a snapshot slot, and its bytes seen as tensors."""

import ctypes
import errno
import mmap
import os

import torch
from torch import Tensor

from deadpool_run.errors import NoMemoryError, SnapshotError
from deadpool_run.text import size
from deadpool_run.vault.headroom import Growth
from deadpool_run.vault.segments import TensorEntry, whole_pages
from deadpool_run.worker.compat.modules import copy_all

_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
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

    def ensure(self, nbytes: int, *, pin_for: torch.device | None = None) -> None:
        """Map at least `nbytes` bytes, growing the file if it is smaller; register them for copies from a CUDA device.

        Raises `NoMemoryError` if there is no memory to grow.
        """
        if self._base is None or self._base.numel() < nbytes:
            self._unpin()
            self._base = self._mapped(nbytes)
            self.mapping_version += 1
        if pin_for is not None and self._pinned is None:
            # 1: portable, for every device. Without registration copies are slower, but still right.
            with torch.cuda.device(pin_for):  # else this thread would open a context on the first device
                result = torch.cuda.cudart().cudaHostRegister(self._base.data_ptr(), self._base.numel(), 1)
            self._pinned = int(result) == 0

    def view(self, entry: TensorEntry) -> Tensor:
        """Return the entry's bytes as a tensor of its dtype, shape and stride."""
        assert self._base is not None
        return tensor_at(self._base, entry)

    def close(self) -> None:
        """Close our descriptor and unmap, once the last view is gone. The slot keeps its content."""
        self._unpin()
        self._base = None
        os.close(self.fd)

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
            torch.cuda.cudart().cudaHostUnregister(self._base.data_ptr())
        self._pinned = None


def _populate(base: Tensor) -> None:
    """Have the kernel allocate every page now: a first touch costs ten times a copy, and no capture should pay for it.

    Through ctypes, because `mmap.madvise` would hold the interpreter's lock all the time.
    """
    where, nbytes = ctypes.c_void_p(base.data_ptr()), ctypes.c_size_t(base.numel())
    _LIBC.madvise(where, nbytes, mmap.MADV_HUGEPAGE)  # only a hint: some kernels have no huge pages for shared memory
    if _LIBC.madvise(where, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):  # an older kernel: pages are allocated at first touch
        raise NoMemoryError(f"no memory for a snapshot of {size(base.numel())}: {os.strerror(number)}")


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
