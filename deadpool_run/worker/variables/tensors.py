"""Tensors and arrays in variables: copies of those that have changed, and the same copy of those that have not.

Whether a large one has changed is asked in each step, and has to be cheap. Torch counts the writes to a tensor; for those that it
does not count (through `.data`) a sample is compared. Arrays have no such count: large ones are sampled, and compared whole at
growing distances.
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from deadpool_run.worker.compat.modules import local, writes_of
from deadpool_run.worker.state.digest import sample

MOST_BYTES = 64 << 20
"""So many bytes are kept of the tensors, arrays and strings of one variable."""
_MOST_IN_ALL = 256 << 20
"""So many bytes of large tensors are kept of all variables together."""
_COMPARED_BYTES = 1 << 20
"""Arrays of up to this size are compared whole in each step."""
_SAMPLES = 1024
_DEVICES = ("cpu", "cuda")


class TensorCopy:
    """A copy of a large tensor. Nobody writes to it, and unchanged tensors have the same one in each snapshot."""

    __slots__ = ("nbytes", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.nbytes = tensor.nbytes


class NoRoomError(Exception):
    """The copies of all variables together are too large."""


class TensorCopies:
    """The copies of the large tensors and arrays of all variables."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._first: set[int] = set()  # copied when the loop began
        self._begun = False
        self._used: set[int] = set()
        self._nbytes = 0
        self._others: dict[int, weakref.ref[Tensor]] = {}
        self.thorough = False
        """Compare arrays whole."""

    def begin(self, others: Iterable[Tensor]) -> None:
        """Forget all copies; the loop begins. `others` are kept otherwise, and so are tensors that share their memory."""
        self._known, self._first, self._used, self._nbytes, self._begun = {}, set(), set(), 0, False
        self._others = {address: weakref.ref(each) for each in others if (address := _address(each))}

    def begun(self) -> None:
        """Note that all copies so far are of when the loop began."""
        self._first, self._begun = set(self._known), True

    def next(self, *, thorough: bool) -> None:
        """Start a snapshot. Free the copies that the one before did not use."""
        kept = self._first | self._used
        self._known = {key: known for key, known in self._known.items() if key in kept and known.source() is not None}
        self._used, self._nbytes, self.thorough = set(), 0, thorough

    def is_other(self, tensor: Tensor) -> bool:
        """Return whether a tensor is kept otherwise."""
        address = _address(tensor)
        other = self._others.get(address)
        found = None if other is None else other()
        return found is not None and _address(found) == address

    def of_tensor(self, tensor: Tensor) -> TensorCopy:
        """Return the copy of a dense tensor, without its graph. Raises `NoRoomError`.

        It is on the tensor's device, or in main memory if it was made when the loop began: such copies are kept.
        """
        writes = -1 if tensor.is_inference() else writes_of(tensor)
        plain = tensor.detach()
        return self._of(
            tensor, plain.nbytes, lambda: (writes, sample(plain)), lambda: self._cloned(plain), exact=writes >= 0
        )

    def _cloned(self, tensor: Tensor) -> Tensor:
        copy = tensor.resolve_conj().resolve_neg().clone()
        return copy if self._begun else copy.cpu()

    def of_array(self, array: Any) -> TensorCopy:
        """Return the copy of an array's bytes, in C order. Raises `NoRoomError`."""
        known = self._known.get(id(array))
        compared = self.thorough or array.nbytes <= _COMPARED_BYTES or (known is not None and known.has_changed)
        if compared and known is not None and known.source() is array and not _has_bytes(array, known.copy.tensor):
            known.has_changed, known.mark = True, None
        return self._of(array, array.nbytes, lambda: sample_of_array(array), lambda: _bytes_of_array(array), exact=True)

    def _of(
        self, source: Any, nbytes: int, mark: Callable[[], Any], copied: Callable[[], Tensor], *, exact: bool
    ) -> TensorCopy:
        key = id(source)
        known = self._known.get(key)
        now = mark()
        if known is None or known.source() is not source or known.mark != now or not exact:
            if self._nbytes + nbytes > _MOST_IN_ALL:
                raise NoRoomError
            changed = known is not None and known.source() is source
            known = self._known[key] = _Known(weakref.ref(source), now, TensorCopy(copied()), has_changed=changed)
            self._first.discard(key)
        if key not in self._first and key not in self._used:
            self._nbytes += nbytes
        self._used.add(key)
        return known.copy


class _Known:
    """A tensor or an array, what tells whether it has changed, and its copy."""

    __slots__ = ("copy", "has_changed", "mark", "source")

    def __init__(self, source: Callable[[], Any], mark: Any, copy: TensorCopy, *, has_changed: bool) -> None:
        self.source = source
        self.mark = mark
        self.copy = copy
        self.has_changed = has_changed


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain one in the memory of a CPU or of a CUDA device."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type in _DEVICES
    return plain and tensor.layout is torch.strided and not tensor.is_quantized


def is_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy or one of its scalars; does not import NumPy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def sample_of_array(array: Any) -> bytes:
    """Return the bytes of some elements, spread over an array; of all in a small one."""
    flat = array.reshape(-1) if array.flags.c_contiguous else array.T.reshape(-1)
    sampled: bytes = flat[:: max(1, flat.size // _SAMPLES)].tobytes()
    return sampled


def _bytes_of_array(array: Any) -> Tensor:
    return torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)


def _has_bytes(array: Any, copy: Tensor) -> bool:
    numpy = sys.modules["numpy"]
    own, kept = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8), copy.numpy()
    whole = own.size // 8 * 8  # in words: eight times as fast
    return own.size == kept.size and all(
        numpy.array_equal(own[part].view(kind), kept[part].view(kind))
        for part, kind in ((slice(whole), numpy.int64), (slice(whole, None), numpy.uint8))
    )


def _address(tensor: Tensor) -> int:
    own = local(tensor)
    return own.untyped_storage().data_ptr() if is_dense(own) else 0
