"""Values of the standard library's and of torch's own classes: their plain parts, and values made of these."""

import datetime as dt
import enum
from array import array
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch

from deadpool_run.worker.codec import device_of, is_current
from deadpool_run.worker.variables.values import shared_numbers
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

TAGS = frozenset({"enum", "bytearray", "array of", "dtype", "made", "shared numbers"})


def is_immutable(value: Any) -> bool:
    """Return whether a value is one of these classes and never changes."""
    return type(value) in _NAMES or type(value) is torch.dtype or isinstance(value, enum.Enum)


def is_kept(value: Any) -> bool:
    """Return whether a value is one of these classes and can change."""
    return type(value) in (bytearray, array) or shared_numbers.memory_of(value) is not None


def parts_of(value: Any) -> list[Any]:
    """Return a tag, names, and last a sequence of the plain values in it."""
    kind = type(value)
    if kind in _NAMES:
        is_own = kind is torch.device and is_current(value)
        return ["made", _NAMES[kind], [_CURRENT] if is_own else value.__reduce__()[1]]
    if isinstance(value, enum.Enum):
        return ["enum", kind.__module__, kind.__qualname__, [value.value]]
    if kind is torch.dtype:
        return ["dtype", [str(value).removeprefix("torch.")]]
    if (memory := shared_numbers.memory_of(value)) is not None:
        return ["shared numbers", [bytes(memory)]]
    return ["bytearray", [bytes(value)]] if kind is bytearray else ["array of", [value.typecode, value.tobytes()]]


def of_parts(tag: str, names: Sequence[str], parts: Sequence[Any], into: Any, class_of: Callable[..., Any]) -> Any:
    """Return the value of these parts, written into `into` if possible. `class_of` returns a class by its module and name.

    Raises `OpaqueError` for numbers that processes share, if this process has not made them.
    """
    match tag:
        case "made":
            return device_of("cuda") if parts == [_CURRENT] else _MADE[names[0]](*parts)
        case "enum":
            return class_of(*names)(parts[0])
        case "dtype":
            return getattr(torch, parts[0])
        case "bytearray":
            return _filled(into if type(into) is bytearray else bytearray(), parts[0])
        case "shared numbers":
            if not shared_numbers.fill(into, parts[0]):
                raise OpaqueError
            return into
    is_alike = type(into) is array and into.typecode == parts[0]
    return _filled(into if is_alike else array(parts[0]), array(*parts))


def _filled(target: Any, content: Any) -> Any:
    target[:] = content
    return target
