"""Layouts of tensors and arrays: the order of their elements in memory. Kernels round differently for another layout."""

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from deadpool_run.worker.codec import array_of
from deadpool_run.worker.compat.modules import negated

_MOST_GAPS = 8
"""A layout whose gaps make it this many times as large as its elements is not kept."""
_SMALL = 1024
"""The limit on the elements of a layout whose gaps are of any size."""
_CONJUGATE, _NEGATIVE = 1, 2


def layout_of_tensor(tensor: Tensor) -> list[Any]:
    """Return the steps between a tensor's elements and its lazy operations; an empty list for C order without these."""
    shape, steps = list(tensor.shape), list(tensor.stride())
    kept = None if steps == _in_c_order(shape) or not _may_be_made(shape, steps, 1) else steps
    lazy = _CONJUGATE * tensor.is_conj() + _NEGATIVE * tensor.is_neg()
    return [kept, lazy] if lazy else [] if kept is None else [kept]


def layout_of_array(array: Any) -> list[Any]:
    """Return the steps between an array's elements, in bytes; an empty list for C order."""
    if array.flags.c_contiguous or not _may_be_made(array.shape, array.strides, array.itemsize):
        return []
    return [list(array.strides)]


def has_gaps(tensor: Tensor) -> bool:
    """Return whether a tensor's elements are not all next to each other, in any order."""
    used = [(abs(step), size) for step, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return 1 + sum(step * (size - 1) for step, size in used) != tensor.numel()


def new_tensor(values: Tensor, steps: list[int] | None = None, lazy: int = 0) -> Tensor:
    """Return a new tensor with these values and a layout of `layout_of_tensor`."""
    if lazy & _NEGATIVE:
        values = -values
    if lazy & _CONJUGATE:
        values = values.conj().resolve_conj()
    if steps is None:
        found = values.clone(memory_format=torch.contiguous_format)
    else:
        found = torch.empty_strided(values.shape, steps, dtype=values.dtype, device=values.device)
        _without_repeats(found, steps).copy_(_without_repeats(values, steps))
    if lazy & _CONJUGATE:
        found = found.conj()
    return negated(found) if lazy & _NEGATIVE else found


def new_array(values: Any, steps: list[int]) -> Any:
    """Return a new array with these values and steps."""
    numpy = sys.modules["numpy"]
    used = [step * (size - 1) for step, size in zip(steps, values.shape, strict=True)]
    memory = numpy.zeros(sum(map(abs, used)) + values.itemsize, numpy.uint8)
    found = numpy.ndarray(values.shape, values.dtype, memory, -sum(each for each in used if each < 0), steps)
    found[...] = values
    return found


def _in_c_order(shape: Sequence[int]) -> list[int]:
    steps = [1] * len(shape)
    for index in range(len(shape) - 2, -1, -1):
        steps[index] = steps[index + 1] * max(shape[index + 1], 1)
    return steps


def _may_be_made(shape: Sequence[int], steps: Sequence[int], unit: int) -> bool:
    """Return whether no two elements overlap, except for repeats, and the gaps between them are not too large."""
    used = sorted((abs(step), size) for step, size in zip(steps, shape, strict=True) if step and size > 1)
    reach = unit
    for step, size in used:
        if step < reach:
            return False
        reach += step * (size - 1)
    count = prod(size for _, size in used)
    return 0 not in shape and reach <= unit * max(_MOST_GAPS * count, _SMALL)


def _without_repeats(tensor: Tensor, steps: list[int]) -> Tensor:
    for dimension, step in enumerate(steps):
        if step == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def into_tensor(into: Any, value: Tensor, layout: list[Any]) -> Tensor:
    """Return the script's tensor with this value if it fits, else a new tensor."""
    if type(into) is Tensor and is_alike(into, value, layout) and _may_be_written(into):
        return into.copy_(value)
    return new_tensor(value, *layout)


def _may_be_written(tensor: Tensor) -> bool:
    has_repeats = any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not (tensor.requires_grad or tensor.is_inference() or has_repeats)


def is_alike(one: Tensor, other: Tensor, layout: list[Any]) -> bool:
    """Return whether two tensors have one type, shape and device, and the first has this layout."""
    is_like = (one.dtype, one.shape, one.device) == (other.dtype, other.shape, other.device)
    return is_like and layout_of_tensor(one) == layout


def into_array(dtype: str, shape: list[int] | None, data: bytes, steps: list[int] | None = None, *, into: Any) -> Any:
    """Return the script's array with this content if it fits, else a new array."""
    made = array_of(dtype, [-1] if shape is None else shape, data)
    if steps is not None:
        made = new_array(made, steps)
    is_like = isinstance(into, sys.modules["numpy"].ndarray) and (into.dtype, into.shape) == (made.dtype, made.shape)
    if not is_like or shape is None or layout_of_array(into) != layout_of_array(made) or not into.flags.writeable:
        return made
    into[...] = made
    return into
