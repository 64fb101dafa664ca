"""Values of the standard library's and of torch's own classes: their plain parts, and values made of these.

Numbers that processes share (`multiprocessing.Value`) are written in place: other processes read the same memory.
"""

import ctypes
import datetime as dt
import enum
import sys
from array import array
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from deadpool_run.worker.codec import device_of, is_current
from deadpool_run.worker.variables.values.objects import OpaqueError

_MADE: dict[str, type] = {
    f"{kind.__module__}.{kind.__qualname__}": kind
    for kind in (
        dt.date,
        dt.datetime,
        dt.time,
        dt.timedelta,
        dt.timezone,
        Decimal,
        Fraction,
        PurePosixPath,
        PureWindowsPath,
        type(Path()),
        range,
        slice,
        torch.device,
        torch.Size,
    )
}
"""Immutable classes. A call of the class with the arguments that `__reduce__` returns makes an equal value."""
_NAMES = {kind: name for name, kind in _MADE.items()}
_CURRENT = "cuda, the one of the process"
C_DATA: Any = ctypes.Array.__base__
"""The class from which all of ctypes derive."""
_SIMPLE: Any = ctypes.c_int.__base__
_NUMBERS = frozenset("?bBhHiIlLqQfdgcu")
"""Type codes of ctypes without pointers and Python objects."""

TAGS = frozenset({"enum", "bytearray", "array of", "dtype", "made", "c numbers"})


def is_immutable(value: Any) -> bool:
    """Return whether a value is one of these classes and never changes."""
    return type(value) in _NAMES or type(value) is torch.dtype or isinstance(value, enum.Enum)


def is_kept(value: Any) -> bool:
    """Return whether a value is one of these classes and can change."""
    return type(value) in (bytearray, array) or c_numbers_of(value) is not None


def c_numbers_of(value: Any) -> memoryview | None:
    """Return the memory of a number of ctypes, an array or a structure of them, or a `multiprocessing.Value`; None for any other object."""
    sharing = sys.modules.get("multiprocessing.sharedctypes")
    if sharing is not None and issubclass(type(value), sharing.SynchronizedBase):
        value = value.get_obj()
    return memoryview(value).cast("B") if _has_numbers(type(value)) else None


def _has_numbers(kind: Any) -> bool:
    if issubclass(kind, ctypes.Structure):
        fields = [each for base in kind.__mro__ for each in vars(base).get("_fields_", ())]
        return all(_has_numbers(each[1]) for each in fields)
    if issubclass(kind, ctypes.Array):
        return _has_numbers(kind._type_)
    return issubclass(kind, _SIMPLE) and kind._type_ in _NUMBERS


def _fill(into: Any, content: bytes) -> bool:
    """Write bytes into numbers of ctypes of the same size. Returns False for any other object."""
    memory = c_numbers_of(into)
    if memory is None or memory.nbytes != len(content):
        return False
    memory[:] = content
    return True


def parts_of(value: Any) -> list[Any]:
    """Return a tag, names, and last a sequence of the plain values in it."""
    kind = type(value)
    if kind in _NAMES:
        is_own = kind is torch.device and is_current(value)
        return ["made", _NAMES[kind], [_CURRENT] if is_own else value.__reduce__()[1]]
    if isinstance(value, enum.Enum):
        is_member = kind.__members__.get(value._name_) is value  # else several flags together
        return ["enum", kind.__module__, kind.__qualname__, [value._name_ if is_member else None, value._value_]]
    if kind is torch.dtype:
        return ["dtype", [str(value).removeprefix("torch.")]]
    if (memory := c_numbers_of(value)) is not None:
        return ["c numbers", [bytes(memory)]]
    return ["bytearray", [bytes(value)]] if kind is bytearray else ["array of", [value.typecode, value.tobytes()]]


def of_parts(tag: str, names: Sequence[str], parts: Sequence[Any], into: Any, class_of: Callable[..., Any]) -> Any:
    """Return the value of these parts, written into `into` if possible. `class_of` returns a class by its module and name.

    Raises `OpaqueError` for numbers that processes share, if this process has not made them.
    """
    match tag:
        case "made":
            return device_of("cuda") if parts == [_CURRENT] else _MADE[names[0]](*parts)
        case "enum":
            return class_of(*names)(parts[1]) if parts[0] is None else class_of(*names).__members__[parts[0]]
        case "dtype":
            return getattr(torch, parts[0])
        case "bytearray":
            return _filled(into if type(into) is bytearray else bytearray(), parts[0])
        case "c numbers":
            if not _fill(into, parts[0]):
                raise OpaqueError
            return into
    is_alike = type(into) is array and into.typecode == parts[0]
    return _filled(into if is_alike else array(parts[0]), array(*parts))


def _filled(target: Any, content: Any) -> Any:
    target[:] = content
    return target
