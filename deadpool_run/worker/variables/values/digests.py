"""Digests of values that are too large for snapshots. They show changes inside lists, dicts and objects, and in arrays.

A digest is compared in the same process only: an object of unknown content counts by its identity.
"""

import sys
import zlib
from collections import deque
from typing import Any

import msgspec
from torch import Tensor, nn
from torch.optim import Optimizer

from deadpool_run.ids import PACKAGE
from deadpool_run.worker.codec import attributes_of
from deadpool_run.worker.compat.writes import all_writes_of
from deadpool_run.worker.state import generators
from deadpool_run.worker.variables.values.kinds.functions import CODE
from deadpool_run.worker.variables.values.tensors import is_array, is_numeric_array, is_scalar, sample_of_array

_MOST_OBJECTS = 1 << 14
_OBJECT_COST = 256
"""Bytes of plain values that are encoded while one object is looked at."""
_TOO_MUCH = 1 << 62
_MOST_IN_ALL = 1 << 20
_MOST_ARRAY_BYTES = 1 << 30
_BY_IDENTITY = (*CODE, nn.Module, Optimizer)
_WELL_KNOWN = frozenset({*sys.stdlib_module_names, "torch", "numpy", PACKAGE})


def digest_of(value: Any) -> tuple[int | None, int]:
    """Return a digest of the numbers, texts and objects in a value, and its cost in bytes; None if there are too many, or too large numbers."""
    search = _Search()
    try:
        found = msgspec.msgpack.encode(value, enc_hook=search.plain)
    except (TypeError, ValueError, OverflowError, RecursionError, RuntimeError):  # the last: another thread adds to it
        return None, _TOO_MUCH
    return zlib.crc32(found), len(found) + _OBJECT_COST * len(search.seen)


def digest_of_array(array: Any) -> int | None:
    """Return a digest of all bytes of an array; None if it cannot be written to, or is too large."""
    if not (is_numeric_array(array) and array.flags.writeable and array.nbytes <= _MOST_ARRAY_BYTES):
        return None
    numpy = sys.modules["numpy"]
    return zlib.crc32(numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8))


class Looks:
    """The looks inside values in one snapshot, and the limit of their costs: a few milliseconds."""

    def __init__(self) -> None:
        self._cost = 0

    def next(self) -> None:
        """Start a snapshot."""
        self._cost = 0

    def may(self, cost: int) -> bool:
        """Return whether a look of this cost is within the limit. It counts then."""
        may = self._cost + cost <= _MOST_IN_ALL
        self._cost += cost if may else 0
        return may


class _Search:
    """A search through the objects of a value."""

    def __init__(self) -> None:
        self.seen: set[int] = set()

    def plain(self, value: Any) -> Any:  # noqa: PLR0911 - one line for each kind
        """Return plain values in place of an object; its identity if it was seen before."""
        kind = type(value)
        if kind is deque:
            return list(value)
        if kind is complex:
            return value.real, value.imag
        if id(value) in self.seen:
            return id(value)
        self.seen.add(id(value))
        if len(self.seen) > _MOST_OBJECTS:
            raise OverflowError
        if issubclass(kind, Tensor):
            return id(value), all_writes_of(value)
        if is_array(value):
            return (0 if is_scalar(value) else id(value)), sample_of_array(value)
        if generator := generators.kind_of(value):
            return repr(generators.state_of(value, generator))
        if issubclass(kind, _BY_IDENTITY) or kind.__module__.partition(".")[0] in _WELL_KNOWN:
            return id(value)
        return id(value), attributes_of(value)
