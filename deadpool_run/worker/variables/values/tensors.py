"""Copies of the large tensors and arrays in variables. A tensor is copied again only after it has changed.

The check for changes runs in each step and must be cheap. Torch counts the writes to a tensor, and our groups those of
collectives. A sample is compared for writes that nobody counts (through `.data`). Arrays have no such count. Arrays, and tensors in main
memory, are compared whole up to a limit in each step, and beyond it at growing distances. What has stayed equal is watched by the kernel,
if it can: then only what was written is compared again.
"""

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from deadpool_run.worker.codec import raw_bytes, tensor_of
from deadpool_run.worker.compat.modules import PLAIN_TENSORS, address_of
from deadpool_run.worker.compat.writes import all_writes_of
from deadpool_run.worker.state.digest import sampled
from deadpool_run.worker.written_pages import WatchedMemory, watch

MOST_BYTES = 64 << 20
"""The limit on the tensors, arrays and strings of one variable."""
_MOST_IN_ALL = 256 << 20
"""The limit on the copies of large tensors and arrays of all variables together."""
_MOST_PARTS = 4096
_COMPARED_BYTES = 1 << 20
"""Arrays of up to this size are compared whole in each step."""
_COMPARED_IN_ALL = 64 << 20
"""Larger arrays, and tensors in main memory, are compared whole up to this limit: some milliseconds in each step."""
_LARGE = 1024
"""Elements. A smaller tensor is a loss, a norm or a count, and may be for the log only."""
SAMPLES = 1024
"""Elements of a large array that are compared."""
_WATCHED_BYTES = 1 << 20
"""Smaller values are not watched: comparing them takes less than a tenth of a millisecond."""
_EQUAL_LOOKS = 4
"""Comparisons after which a value is watched, if it was equal. The first write to a watched page takes as long as some comparisons of it."""
_NUMERIC = "biufcSUmM"
"""Kinds of arrays: bools, numbers with and without a sign, with a fraction, complex, text, times."""
_compare = ctypes.CDLL(None).memcmp
"""Returns 0 if two places in memory have the same bytes: several times as fast as a comparison of elements."""
_compare.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class TensorCopy:
    """A copy of a large tensor, never written to. Unchanged tensors have the same one in each snapshot."""

    __slots__ = ("_digest", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._digest: int | None = None

    def digest(self) -> int:
        """Return a digest of all bytes."""
        if self._digest is None:
            self._digest = crc32(raw_bytes(self.tensor))
        return self._digest


@dataclass(eq=False, slots=True)
class _Known:
    """A tensor or an array, how often it was written to, and its copy."""

    source: Callable[[], Any]
    writes: int
    copy: TensorCopy
    has_changed: bool
    """An array has changed since the loop began; a tensor was written to in a way that torch does not count."""
    _sampled: Tensor | None = None
    _equal_looks: int = 0
    _watched: WatchedMemory | None = None

    def is_untouched(self, address: int) -> bool:
        """Return whether the kernel has watched the memory at this address since it was equal to the copy, and nobody has written to it."""
        copy = self.copy.tensor
        if self._watched is None or not self._watched.is_untouched(address, copy.nbytes):
            return False
        return all(_are_equal(address, copy, part) for part in self._watched.edges())

    def is_equal(self, address: int, nbytes: int, *, may_watch: bool) -> bool:
        """Return whether this memory has the bytes of the copy. If it often had, watch it from now on."""
        often = self._equal_looks >= _EQUAL_LOOKS and nbytes >= _WATCHED_BYTES and not self.has_changed
        watched = watch(address, nbytes) if may_watch and often else None  # first: a write during the comparison counts
        is_equal = nbytes == self.copy.tensor.nbytes and _are_equal(address, self.copy.tensor, slice(0, nbytes))
        self._watched = watched if is_equal else None
        self._equal_looks += 1
        return is_equal

    def has_samples(self, tensor: Tensor) -> bool:
        """Return whether a sample of a tensor is as in the copy."""
        if self._sampled is None:  # only now: most tensors are replaced before they are seen again
            self._sampled = sampled(self.copy.tensor).cpu()
        now = sampled(tensor.resolve_conj().resolve_neg())
        return torch.equal(now.cpu(), self._sampled)


class _Place:
    """Where the memory of a tensor begins. Cheap while the tensor stays where it is."""

    __slots__ = ("_address", "_pointer", "source")

    def __init__(self, source: Callable[[], Tensor | None]) -> None:
        self.source = source
        self._pointer, self._address = -1, 0

    def address(self) -> int:
        """Return the present address; 0 if there is none."""
        tensor = self.source()
        if tensor is None or type(tensor) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
            return address_of(tensor)
        pointer = tensor.data_ptr()
        if pointer != self._pointer:
            self._pointer, self._address = pointer, address_of(tensor)
        return self._address


class TensorCopies:
    """The copies of the large tensors and arrays of all variables. Made when the loop begins."""

    def __init__(self, others: Iterable[Tensor] = ()) -> None:
        """`others` are kept otherwise, and so are tensors that share their memory."""
        self._known: dict[int, _Known] = {}
        self._first: set[int] = set()  # copied when the loop began
        self._begun = False
        self._used: set[int] = set()
        self._nbytes = 0
        self._places = [_Place(weakref.ref(each)) for each in others]
        self._others = {address: each.source for each in self._places if (address := each.address())}
        self._present: set[int] | None = None
        self._thorough = False  # all are compared whole
        self._compared = 0

    def begun(self) -> None:
        """Mark all copies so far as made when the loop began."""
        self._first, self._begun = set(self._known), True

    def next(self, *, thorough: bool) -> None:
        """Start a snapshot. Free the copies that the previous snapshot did not use."""
        kept = self._first | self._used
        self._known = {key: known for key, known in self._known.items() if key in kept and known.source() is not None}
        self._used, self._nbytes, self._thorough, self._compared = set(), 0, thorough, 0
        self._present = None

    def is_other(self, tensor: Tensor) -> bool:
        """Return whether a tensor is kept otherwise."""
        address = address_of(tensor)
        other = self._others.get(address)
        return other is not None and address_of(other()) == address

    def has_moved(self, tensor: Tensor) -> bool:
        """Return whether a tensor has memory to which another that is kept otherwise was moved after the loop began."""
        if self._present is None:  # once in a snapshot
            self._present = {each.address() for each in self._places}
        address = address_of(tensor)
        return bool(address) and address in self._present and not self.is_other(tensor)

    def of_tensor(self, tensor: Tensor) -> TensorCopy | None:
        """Return the copy of a dense tensor in C order, without its graph; None if all copies together would be too large.

        It is on the tensor's device, or in main memory if it was made when the loop began: such copies are kept.
        """
        writes = all_writes_of(tensor)
        known = self._known_of(tensor)
        is_counted = known is not None and writes >= 0 and known.writes == writes
        if known is not None and is_counted and self._is_still(known, tensor):
            return self._use(tensor, known)
        if not self._has_room(tensor.nbytes):
            return None
        copy = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        return self._note(tensor, writes, copy if self._begun else copy.cpu(), has_changed=is_counted)

    def of_array(self, array: Any) -> TensorCopy | None:
        """Return the copy of an array's bytes, in C order; None if all copies together would be too large."""
        known = self._known_of(array)
        if known is not None and self._is_array_still(known, array):
            return self._use(array, known)
        if not self._has_room(array.nbytes):
            return None
        return self._note(array, 0, tensor_of(array.tobytes()), has_changed=known is not None)

    def _is_still(self, known: _Known, tensor: Tensor) -> bool:
        """Return whether a tensor without counted writes is equal to its copy. On CUDA, where this waits, only in a thorough look."""
        if tensor.is_cuda:
            return not known.has_changed and (not self._thorough or known.has_samples(tensor))
        if not known.copy.tensor.is_cpu:
            return known.has_samples(tensor)
        is_plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
        if is_plain and not self._thorough and known.is_untouched(tensor.data_ptr()):
            return True
        if not self._compares(tensor.nbytes):
            return known.has_samples(tensor)
        own = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return known.is_equal(own.data_ptr(), own.nbytes, may_watch=is_plain and not tensor.is_pinned())

    def _is_array_still(self, known: _Known, array: Any) -> bool:
        is_plain = bool(array.flags.c_contiguous)
        if is_plain and not self._thorough and known.is_untouched(array.ctypes.data):
            return True
        if not (self._compares(array.nbytes) or array.nbytes <= _COMPARED_BYTES or known.has_changed):
            return _has_sampled(array, known.copy.tensor)
        own = sys.modules["numpy"].ascontiguousarray(array)
        return known.is_equal(own.ctypes.data, own.nbytes, may_watch=is_plain)

    def _compares(self, nbytes: int) -> bool:
        """Return whether so many bytes are compared whole in this snapshot."""
        may = self._thorough or self._compared + nbytes <= _COMPARED_IN_ALL
        self._compared += nbytes if may else 0
        return may

    def _known_of(self, source: Any) -> _Known | None:
        known = self._known.get(id(source))
        return known if known is not None and known.source() is source else None

    def _note(self, source: Any, writes: int, copy: Tensor, *, has_changed: bool) -> TensorCopy:
        known = self._known[id(source)] = _Known(weakref.ref(source), writes, TensorCopy(copy), has_changed)
        self._first.discard(id(source))
        return self._use(source, known)

    def _use(self, source: Any, known: _Known) -> TensorCopy:
        if id(source) not in self._first and id(source) not in self._used:
            self._nbytes += known.copy.tensor.nbytes
        self._used.add(id(source))
        return known.copy

    def _has_room(self, nbytes: int) -> bool:
        return self._nbytes + nbytes <= _MOST_IN_ALL


def is_freed(tensor: Tensor) -> bool:
    """Return whether the memory of a dense tensor was freed, as FSDP does between its uses. To read it ends the process."""
    return tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy or one of its scalars; does not import NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def is_scalar(array: Any) -> bool:
    """Return whether one of `is_array` is a scalar. An array without dimensions is not: it may change in place."""
    return isinstance(array, sys.modules["numpy"].generic)


def is_numeric_array(value: Any) -> bool:
    """Return whether a value is an array or a scalar of NumPy's own classes, of numbers, text or times, or of fields with these."""
    if not is_array(value) or type(value).__module__ != "numpy" or not value.dtype.itemsize:
        return False
    return value.dtype.kind in _NUMERIC or (value.dtype.fields is not None and not value.dtype.hasobject)


def is_object_array(value: Any) -> bool:
    """Return whether a value is an array of any objects."""
    return is_array(value) and type(value).__name__ == "ndarray" and value.dtype.hasobject and not value.dtype.fields


def is_array_type(value: Any) -> bool:
    """Return whether a value is the type of an array's elements. It never changes."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.dtype)


def is_data(value: Any) -> bool:
    """Return whether a value is a tensor or an array: an object that may be too large to be kept alive."""
    return isinstance(value, Tensor) or (is_array(value) and not is_scalar(value))


def sample_of_array(array: Any) -> bytes:
    """Return the bytes of elements spread over an array; of all elements of a small one."""
    flat = array.reshape(-1)
    found: bytes = flat[:: max(1, flat.size // SAMPLES)].tobytes()
    return found


def sample_of(value: Any) -> bytes:
    """Return the bytes of elements spread over a tensor or an array; of all elements of a small one."""
    return (
        raw_bytes(sampled(value.resolve_conj().resolve_neg())) if isinstance(value, Tensor) else sample_of_array(value)
    )


def _has_sampled(array: Any, copy: Tensor) -> bool:
    kept = copy.numpy().view(array.dtype).reshape(array.shape)
    return sample_of_array(array) == sample_of_array(kept)


def _are_equal(address: int, copy: Tensor, part: slice) -> bool:
    """Return whether a part of the memory at an address has the bytes of a copy, NaNs among them."""
    return not _compare(address + part.start, copy.data_ptr() + part.start, part.stop - part.start)


def larger_tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the larger ones of `tensors_of`, except those that require gradients."""
    for part, tensor in tensors_of(value):
        if not tensor.requires_grad and tensor.numel() >= _LARGE and not (tensor.is_meta or is_freed(tensor)):
            yield part, tensor


def tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensor that a value is, or those directly in a container, each with its index in the script's notation."""
    if issubclass(type(value), Tensor):
        yield "", value
    elif type(value) in (list, tuple, dict) and len(value) <= _MOST_PARTS:
        parts = list(value.items() if type(value) is dict else enumerate(value))
        yield from ((f"[{key!r}]", part) for key, part in parts if issubclass(type(part), Tensor))
