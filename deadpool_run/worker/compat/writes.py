"""Writes to tensors: those that torch counts, and those of collectives, which it does not."""

import itertools
from collections.abc import Iterable
from contextlib import suppress

import torch
from torch import Tensor

from deadpool_run.worker.compat.modules import PLAIN_TENSORS, address_of, writes_of

_MOST = 1 << 16
"""Addresses that are remembered. If one is forgotten, its tensor counts as written once more."""
_LEAST_BYTES = 16 << 10
"""The least memory of a tensor in main memory for which this matters: smaller ones are compared by value."""
_SHIFT = 40
_numbers = itertools.count(1)
_last: dict[int, int] = {}
"""The number of the last collective that wrote to the memory at an address, in the order of these numbers."""


def note_collective(outputs: Iterable[Tensor]) -> None:
    """Note that a collective writes to these tensors. Any thread."""
    number = next(_numbers)
    for output in outputs:
        if (address := address_of(output)) and (output.is_cuda or output.untyped_storage().nbytes() >= _LEAST_BYTES):
            _last.pop(address, None)
            _last[address] = number
    while len(_last) > _MOST:
        with suppress(StopIteration, RuntimeError, KeyError):  # another thread does the same
            del _last[next(iter(_last))]


def all_writes_of(tensor: Tensor) -> int:
    """Return a number that changes with each write to a tensor or its views, but not through `.data`; -1 if torch counts none."""
    if tensor.is_inference():
        return -1
    if not _last:
        return writes_of(tensor)
    is_plain = type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided
    address = tensor.untyped_storage().data_ptr() if is_plain else address_of(tensor)
    return writes_of(tensor) + (_last.get(address, 0) << _SHIFT)
