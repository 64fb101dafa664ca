"""Writes to tensors: those that torch counts, and those of collectives, which it does not."""

import itertools
from collections.abc import Iterable

from torch import Tensor

from deadpool_run.worker.compat.modules import address_of, writes_of

_MOST = 1 << 16
"""Addresses that are remembered. Then they are forgotten together, and every tensor counts as written once."""
_SHIFT = 40
_numbers = itertools.count(1)
_last: dict[int, int] = {}
"""The number of the last collective that wrote to the memory at an address."""
_forgotten = 0


def note_collective(outputs: Iterable[Tensor]) -> None:
    """Note that a collective writes to these tensors. Any thread."""
    global _forgotten  # noqa: PLW0603 - one a process
    number = next(_numbers)
    if len(_last) >= _MOST:
        _forgotten = number
        _last.clear()
    for output in outputs:
        if address := address_of(output):
            _last[address] = number


def all_writes_of(tensor: Tensor) -> int:
    """Return a number that changes with each write to a tensor or its views, but not through `.data`; -1 if torch counts none."""
    if tensor.is_inference():
        return -1
    return writes_of(tensor) + (_last.get(address_of(tensor), _forgotten) << _SHIFT)
