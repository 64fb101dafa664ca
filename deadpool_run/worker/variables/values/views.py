"""Tensors and arrays that share memory: which they are, and views of the same memory in another process."""

import sys
from typing import Any

import torch
from torch import Tensor

from deadpool_run.worker.codec import dtype_of, name_of_dtype
from deadpool_run.worker.variables.values.tensors import is_dense, is_freed, is_numeric_array

Memory = tuple[type, int]
"""A kind of values, and an address."""


def memory_of(value: Any) -> Memory | None:
    """Return the memory that a tensor and all views of it share, or an array and its views; None if that is not known.

    A tensor and an array at one address count as apart: they measure their layouts in other units.
    """
    if isinstance(value, Tensor):
        is_known = is_dense(value) and not is_freed(value)
        return (Tensor, value.untyped_storage().data_ptr()) if is_known else None
    root = _root(value)
    return (object, _address(root)) if _is_whole(root) else None


def has_whole_memory(value: Any) -> bool:
    """Return whether a tensor or an array, whose memory is known, has all of it, in order."""
    if isinstance(value, Tensor):
        return value.is_contiguous() and value.nbytes == value.untyped_storage().nbytes()
    return value.base is None


def may_be_view(value: Any) -> bool:
    """Return whether a tensor or an array is of a kind that `view_of` can make."""
    if isinstance(value, Tensor):
        is_plain = type(value) is Tensor and not value.requires_grad and not (value.is_conj() or value.is_neg())
        return is_plain and value.numel() > 0
    return value.base is not None and value.size > 0 and type(value).__name__ == "ndarray"


def layout_of(value: Any) -> list[Any]:
    """Return where a view is in its memory: class of its elements, shape, steps and offset."""
    if isinstance(value, Tensor):
        return [
            str(value.dtype).removeprefix("torch."),
            list(value.shape),
            list(value.stride()),
            value.storage_offset(),
        ]
    offset = _address(value) - _address(_root(value))
    return [name_of_dtype(value.dtype), list(value.shape), list(value.strides), offset]


def view_of(base: Any, dtype: str, shape: list[int], steps: list[int], offset: int) -> Any:
    """Return a view with this layout of the memory of `base`."""
    if isinstance(base, Tensor):
        whole = torch.empty(0, dtype=getattr(torch, dtype), device=base.device)
        return whole.set_(base.untyped_storage(), offset, shape, steps)
    numpy = sys.modules["numpy"]
    return numpy.ndarray(shape, dtype_of(dtype), _root(base), offset, steps)


def _address(array: Any) -> int:
    found: int = array.__array_interface__["data"][0]
    return found


def _root(array: Any) -> Any:
    while is_numeric_array(array.base):
        array = array.base
    return array


def _is_whole(array: Any) -> bool:
    return is_numeric_array(array) and array.ndim > 0 and array.base is None and bool(array.flags.c_contiguous)
