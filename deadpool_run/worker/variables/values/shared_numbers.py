"""Numbers of ctypes, also those that processes share (`multiprocessing.Value` and `Array`): their bytes, written in place."""

import ctypes
import sys
from typing import Any

C_DATA: Any = ctypes.Array.__base__
"""The class from which all of ctypes derive."""
_SIMPLE: Any = ctypes.c_int.__base__
_NUMBERS = frozenset("?bBhHiIlLqQfdgcu")
"""Type codes of ctypes without pointers and Python objects."""


def memory_of(value: Any) -> memoryview | None:
    """Return the bytes of a number, an array or a structure of numbers, with or without a lock; None for any other object."""
    sharing = sys.modules.get("multiprocessing.sharedctypes")
    if sharing is not None and isinstance(value, sharing.SynchronizedBase):
        value = value.get_obj()
    return memoryview(value).cast("B") if _has_numbers(type(value)) else None


def _has_numbers(kind: Any) -> bool:
    if issubclass(kind, ctypes.Structure):
        fields = [each for base in kind.__mro__ for each in vars(base).get("_fields_", ())]
        return all(_has_numbers(each[1]) for each in fields)
    if issubclass(kind, ctypes.Array):
        return _has_numbers(kind._type_)
    return issubclass(kind, _SIMPLE) and kind._type_ in _NUMBERS


def fill(into: Any, content: bytes) -> bool:
    """Write bytes into numbers of the same size. Returns False if the object is no such numbers."""
    memory = memory_of(into)
    if memory is None or memory.nbytes != len(content):
        return False
    memory[:] = content
    return True
