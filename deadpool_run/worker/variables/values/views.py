"""Tensors and arrays that share memory: which they are, and views of the same memory in another process."""

import sys
from typing import Any

import torch
from torch import Tensor

from deadpool_run.worker.variables.values.tensors import is_dense, is_freed, is_numeric_array


def memory_of(value: Any) -> int:
    """Return the address of the memory that a tensor or an array and all views of it share; 0 if that is not known."""
    if isinstance(value, Tensor):
        return value.untyped_storage().data_ptr() if is_dense(value) and not is_freed(value) else 0
    root = _root(value)
    found: int = root.__array_interface__["data"][0] if _is_whole(root) else 0
    return found


def has_whole_memory(value: Any) -> bool:
    """Return whether a tensor or an array has all of its memory, in order."""
    if isinstance(value, Tensor):
        return bool(memory_of(value)) and value.is_contiguous() and value.nbytes == value.untyped_storage().nbytes()
    return value.base is None and bool(memory_of(value))


def may_be_view(value: Any) -> bool:
    """Return whether a tensor or an array is of a kind that `view_of` can make."""
    if isinstance(value, Tensor):
        is_plain = type(value) is Tensor and not value.requires_grad and not (value.is_conj() or value.is_neg())
        return is_plain and value.numel() > 0 and bool(memory_of(value))
    return value.base is not None and value.size > 0 and bool(memory_of(value)) and type(value).__name__ == "ndarray"


def layout_of(value: Any) -> list[Any]:
    """Return where a view is in its memory: class of its elements, shape, steps and offset."""
    if isinstance(value, Tensor):
        return [
            str(value.dtype).removeprefix("torch."),
            list(value.shape),
            list(value.stride()),
            value.storage_offset(),
        ]
    offset = value.__array_interface__["data"][0] - memory_of(value)
    return [value.dtype.str, list(value.shape), list(value.strides), offset]


def view_of(base: Any, dtype: str, shape: list[int], steps: list[int], offset: int) -> Any:
    """Return a view with this layout of the memory of `base`."""
    if isinstance(base, Tensor):
        whole = torch.empty(0, dtype=getattr(torch, dtype), device=base.device)
        return whole.set_(base.untyped_storage(), offset, shape, steps)
    numpy = sys.modules["numpy"]
    return numpy.ndarray(shape, numpy.dtype(dtype), _root(base), offset, steps)


def _root(array: Any) -> Any:
    while is_numeric_array(array.base):
        array = array.base
    return array


def _is_whole(array: Any) -> bool:
    return is_numeric_array(array) and array.ndim > 0 and array.base is None and bool(array.flags.c_contiguous)
