"""Tensors and arrays that share memory: which they are, and views of the same memory in another process.

An array may share memory with a tensor: `torch.from_numpy()` and `Tensor.numpy()` make such pairs.
"""

import sys
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from deadpool_run.worker.codec import dtype_of, name_of_dtype
from deadpool_run.worker.compat.modules import is_dense, seen_through
from deadpool_run.worker.variables.values.layouts import has_gaps
from deadpool_run.worker.variables.values.tensors import is_freed, is_numeric_array, is_scalar

Memory = tuple[type, int]
"""A kind of values, and an address."""
_SMALL_BYTES = 16 << 10
_MOST_COMPARED = 1 << 22
"""Elements between the first and the last of two views. Those of larger ones may overlap."""
_MOST_WORK = 1 << 12
_MOST_MARKED = 1 << 20
"""Bytes between the first and the last of a value with gaps in which others are looked for."""


def memory_of(value: Any) -> Memory | None:
    """Return the memory that a tensor and all views of it share, or an array and its views; None if that is not known.

    The kind is that of the value that has the memory. An array over a tensor's memory counts as a view of that tensor.
    """
    if isinstance(value, Tensor):
        is_known = is_dense(value) and not is_freed(value)
        return (Tensor, value.untyped_storage().data_ptr()) if is_known else None
    root = _root(value)
    if not is_numeric_array(root):
        return None
    if (under := tensor_under(value)) is not None:
        return memory_of(under) if under.device.type == "cpu" else None
    return (object, address_of_array(root)) if _is_whole(root) else None


def memories_of(value: Any) -> list[Memory]:
    """Return `memory_of` a value, and the same memory as that of a value of the other kind."""
    memory = memory_of(value)
    if memory is None or (isinstance(value, Tensor) and value.device.type != "cpu"):
        return [] if memory is None else [memory]
    kind, address = memory
    return [memory, (object if kind is Tensor else Tensor, address)]


def tensor_under(array: Any) -> Tensor | None:
    """Return the tensor whose memory an array shares, if `Tensor.numpy()` has made the array or its base."""
    found = _root(array).base
    return found if isinstance(found, Tensor) else None


def has_whole_memory(value: Any) -> bool:
    """Return whether a tensor or an array, whose memory is known, has all of it."""
    if isinstance(value, Tensor):
        return value.nbytes == value.untyped_storage().nbytes() and not has_gaps(value)
    return _has_own_memory(value)


def may_be_view(value: Any) -> bool:
    """Return whether a tensor or an array is of a kind that `view_of` can make."""
    if isinstance(value, Tensor):
        is_plain = type(value) is Tensor and not value.requires_grad and not (value.is_conj() or value.is_neg())
        return is_plain and value.numel() > 0
    return value.size > 0 and type(value).__name__ in ("ndarray", "memmap")


def base_of(value: Any) -> Any:
    """Return the tensor or array that has all memory of a view; None if there is none, or if it is much larger."""
    tensor = value if isinstance(value, Tensor) else tensor_under(value)
    if tensor is None:
        base = None if value.base is None else _root(value)
    else:
        base = seen_through(tensor)
        base = tensor if base is None and tensor is not value else base
    if base is None or not may_be_view(base) or memory_of(base) != memory_of(value) or not has_whole_memory(base):
        return None
    return base if base.nbytes <= max(2 * value.nbytes, _SMALL_BYTES) else None


def covers(owner: Any, value: Any) -> bool:
    """Return whether all bytes of a tensor or an array are among those of another one, which shares memory with it.

    False if the other one has gaps, its first and last byte are far apart, and the value is no slice of it.
    """
    (low, high), (first, last) = _range_of(owner), _range_of(value)
    if first < low or high < last:
        return False
    steps = _steps_of(owner)
    if high - low == owner.nbytes and all(step or count == 1 for step, count in steps):
        return True
    if _size_of(owner) == _size_of(value) and _is_slice(steps, _steps_of(value), first - low):
        return True
    if high - low > _MOST_MARKED:
        return False
    marks = torch.zeros(high - low, dtype=torch.bool)
    _places_of(owner, marks, 0).fill_(value=True)
    return bool(_places_of(value, marks, first - low).all())


def start_of(value: Any) -> int:
    """Return the address of the first byte of a tensor or an array."""
    return _range_of(value)[0]


def _steps_of(value: Any) -> list[tuple[int, int]]:
    """Return for each dimension the bytes from one element to the next, in the order of addresses, and the number of elements."""
    if isinstance(value, Tensor):
        return [(step * _size_of(value), count) for step, count in zip(value.stride(), value.shape, strict=True)]
    return [(abs(step), count) for step, count in zip(value.strides, value.shape, strict=True)]


def _range_of(value: Any) -> tuple[int, int]:
    """Return the addresses of the first byte and after the last one."""
    if isinstance(value, Tensor):
        low = value.data_ptr()
    else:
        backwards = (step * (count - 1) for step, count in zip(value.strides, value.shape, strict=True) if step < 0)
        low = address_of_array(value) + sum(backwards)
    return low, low + _size_of(value) + sum(step * (count - 1) for step, count in _steps_of(value))


def _is_slice(steps: list[tuple[int, int]], of_slice: list[tuple[int, int]], offset: int) -> bool:
    """Return whether a view that begins at `offset` moves along the dimensions of another one, and stays within each."""
    left = [(step, count) for step, count in of_slice if count > 1]
    for step, count in sorted(steps, reverse=True):
        if count == 1:
            continue
        if step == 0:
            return False
        at, offset = divmod(offset, step)
        along = [(each // step, number) for each, number in left if each % step == 0]
        if at + sum(each * (number - 1) for each, number in along) >= count:
            return False
        left = [each for each in left if each[0] % step]
    return not left and not offset


def _size_of(value: Any) -> int:
    """Return the bytes of an element."""
    size: int = value.element_size() if isinstance(value, Tensor) else value.itemsize
    return size


def _places_of(value: Any, marks: Tensor, offset: int) -> Tensor:
    """Return the bytes of a value in `marks`, where its first byte is at `offset`."""
    steps, counts = zip(*_steps_of(value), (1, _size_of(value)), strict=True)
    return marks.as_strided(counts, steps, offset)


def do_overlap(one: Any, other: Any) -> bool:
    """Return whether two tensors or two arrays that share memory have elements in common."""
    if not (isinstance(one, Tensor) or isinstance(other, Tensor)):
        try:
            return bool(sys.modules["numpy"].shares_memory(one, other, max_work=_MOST_WORK))
        except RuntimeError:  # it needs more work
            return True
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return True
    (first, last), (other_first, other_last) = _range_of(one), _range_of(other)
    if last <= other_first or other_last <= first:
        return False
    start, size = min(first, other_first), one.element_size()
    count = (max(last, other_last) - start) // size
    if one.dtype != other.dtype or count > _MOST_COMPARED:
        return True
    marks = torch.zeros(count, dtype=torch.bool)
    marks.as_strided(one.shape, one.stride(), (first - start) // size).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), (other_first - start) // size).any())


def layout_of(value: Any) -> list[Any]:
    """Return where a view is in its memory: class of its elements, shape, steps and offset."""
    if isinstance(value, Tensor):
        return [
            str(value.dtype).removeprefix("torch."),
            list(value.shape),
            list(value.stride()),
            value.storage_offset(),
        ]
    under = tensor_under(value)
    start = address_of_array(_root(value)) if under is None else under.untyped_storage().data_ptr()
    offset = address_of_array(value) - start
    return [name_of_dtype(value.dtype), list(value.shape), list(value.strides), offset]


def view_of(base: Any, dtype: str, shape: list[int], steps: list[int], offset: int) -> Any:
    """Return a view with this layout of the memory of `base`: an array if `dtype` is the name of an array's, else a tensor."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and not hasattr(torch, dtype):
        memory = _bytes_of(base).numpy() if isinstance(base, Tensor) else _root(base)
        return numpy.ndarray(shape, dtype_of(dtype), memory, offset, steps)
    if not isinstance(base, Tensor):
        base = torch.from_numpy(_root(base).reshape(-1).view("u1"))
    whole = torch.empty(0, dtype=getattr(torch, dtype), device=base.device)
    return whole.set_(base.untyped_storage(), offset, shape, steps)


def address_of_array(array: Any) -> int:
    """Return where the first element of an array is."""
    found: int = array.__array_interface__["data"][0]
    return found


def _bytes_of(tensor: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8)
    return whole.set_(tensor.untyped_storage())


def _root(array: Any) -> Any:
    while is_numeric_array(array.base):
        array = array.base
    return array


def _is_whole(array: Any) -> bool:
    return (
        is_numeric_array(array) and not is_scalar(array) and _has_own_memory(array) and bool(array.flags.c_contiguous)
    )


def _has_own_memory(array: Any) -> bool:
    return array.base is None or isinstance(array.base, mmap)
