"""Values of the standard library's and of torch's own classes: their plain parts, and values made of these.

Numbers that processes share (`multiprocessing.Value`) are written in place: other processes read the same memory.
"""

import ctypes
import datetime as dt
import enum
import io
import re
import sys
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from uuid import UUID

import torch

from deadpool_run.worker.codec import class_of_name, device_of, is_current
from deadpool_run.worker.variables.values.objects import OpaqueError
from deadpool_run.worker.variables.values.tensors import is_array_type

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
        time.struct_time,
        type(...),
        type(NotImplemented),
        UUID,
        re.Pattern,
        torch.device,
        torch.Size,
    )
}
"""Immutable classes. A call of the class, or of `_MAKERS`, with the arguments that `__reduce__` or `_ARGUMENTS` returns makes an equal value."""
_NAMES = {kind: name for name, kind in _MADE.items()}
_MAKERS: dict[Any, Callable[..., Any]] = {re.Pattern: re.compile}
_ARGUMENTS: dict[Any, Callable[[Any], Sequence[Any]]] = {
    type(...): lambda _: (),
    type(NotImplemented): lambda _: (),
    UUID: lambda value: (str(value),),
    re.Pattern: lambda value: (value.pattern, value.flags),
    torch.device: lambda value: (_CURRENT,) if is_current(value) else value.__reduce__()[1],
}
"""The arguments for classes whose `__reduce__` does not return them."""
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
"""Constants of torch, by name."""
_CURRENT = "cuda, the one of the process"
_FILES = {each.__name__: each for each in (io.BytesIO, io.StringIO)}
"""Files in memory. Their state has the content, the position and attributes."""
_MOST_IN_FILE = 16 << 20
"""Characters. A larger one is left alone: a log, say."""
C_DATA: Any = ctypes.Array.__base__
"""The class from which all of ctypes derive."""
_SIMPLE: Any = ctypes.c_int.__base__
_NUMBERS = frozenset("?bBhHiIlLqQfdgcu")
"""Type codes of ctypes without pointers and Python objects."""

TAGS = frozenset(
    {"enum", "bytearray", "array of", "constant of torch", "made", "c numbers", "error", "array type", "file"}
)


def is_immutable(value: Any) -> bool:
    """Return whether a value is one of these classes and never changes."""
    return type(value) in _NAMES or type(value) in _OF_TORCH or isinstance(value, enum.Enum) or is_plain_type(value)


def is_plain_type(value: Any) -> bool:
    """Return whether a value is the type of an array's elements, without fields."""
    return is_array_type(value) and value.names is None and value.subdtype is None and not value.hasobject


def is_kept(value: Any) -> bool:
    """Return whether a value is one of these classes and can change."""
    if type(value) in _FILES.values():
        return not value.closed and _end_of(value) <= _MOST_IN_FILE
    return (
        type(value) in (bytearray, array) or issubclass(type(value), BaseException) or c_numbers_of(value) is not None
    )


def _end_of(file: io.BytesIO | io.StringIO) -> int:
    """Return the length of a file in memory."""
    here = file.tell()
    try:
        return file.seek(0, io.SEEK_END)
    finally:
        file.seek(here)


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


def parts_of(value: Any) -> list[Any]:  # noqa: PLR0911 - one line for each kind
    """Return a tag, names, and last a sequence of the plain values in it."""
    kind = type(value)
    if kind in _NAMES:
        arguments = _ARGUMENTS[kind](value) if kind in _ARGUMENTS else value.__reduce__()[1]
        return ["made", _NAMES[kind], arguments]
    if isinstance(value, enum.Enum):
        is_member = kind.__members__.get(value._name_) is value  # else several flags together
        return ["enum", kind.__module__, kind.__qualname__, [value._name_ if is_member else None, value._value_]]
    if kind in _OF_TORCH:
        return ["constant of torch", [str(value).removeprefix("torch.")]]
    if issubclass(kind, BaseException):
        base = _builtin_of(kind)
        if not _may_be_made(kind, base):
            raise OpaqueError
        names = list(vars(value))
        return [
            "error",
            kind.__module__,
            kind.__qualname__,
            [tuple(names), *base.__reduce__(value)[1], *vars(value).values()],
        ]
    if is_array_type(value):
        return ["array type", [value.str]]
    if kind in _FILES.values():
        return ["file", kind.__name__, value.__getstate__()]
    if (memory := c_numbers_of(value)) is not None:
        return ["c numbers", [bytes(memory)]]
    return ["bytearray", [bytes(value)]] if kind is bytearray else ["array of", [value.typecode, value.tobytes()]]


def of_parts(tag: str, names: Sequence[str], parts: Sequence[Any], into: Any, class_of: Callable[..., Any]) -> Any:  # noqa: PLR0911 - one line for each kind
    """Return the value of these parts, written into `into` if possible. `class_of` returns a class by its module and name.

    Raises `OpaqueError` for numbers that processes share, if this process has not made them.
    """
    match tag:
        case "made":
            kind = _MADE[names[0]]
            return device_of("cuda") if parts == [_CURRENT] else _MAKERS.get(kind, kind)(*parts)
        case "enum":
            return class_of(*names)(parts[1]) if parts[0] is None else class_of(*names).__members__[parts[0]]
        case "constant of torch":
            return getattr(torch, parts[0])
        case "file":
            return _file(_FILES[names[0]], parts, into)
        case "array type":
            return sys.modules["numpy"].dtype(parts[0])
        case "error":
            attributes, arguments = parts[0], parts[1:]
            first = len(arguments) - len(attributes)
            return _error(class_of(*names), arguments[:first], dict(zip(attributes, arguments[first:], strict=True)))
        case "bytearray":
            return _filled(into if type(into) is bytearray else bytearray(), parts[0])
        case "c numbers":
            if not _fill(into, parts[0]):
                raise OpaqueError
            return into
    is_alike = type(into) is array and into.typecode == parts[0]
    return _filled(into if is_alike else array(parts[0]), array(*parts))


def _file(kind: Any, state: Sequence[Any], into: Any) -> Any:
    """Return a file in memory. Raises `OpaqueError` if a part of the script still has its memory."""
    found: Any = into if type(into) is kind and not into.closed else kind()
    try:
        found.__setstate__(tuple(state))
    except BufferError as error:
        raise OpaqueError from error
    return found


def _may_be_made(kind: Any, base: Any) -> bool:
    """Return whether `_error` makes an exception of this class: every process finds it by name, and only `base` is written in C."""
    is_found = class_of_name(kind.__module__, kind.__qualname__) is kind
    return kind is base or (is_found and kind.__basicsize__ == _size_of_derived(base))


@cache
def _size_of_derived(base: Any) -> int:
    return type("_Derived", (base,), {}).__basicsize__


def _builtin_of(kind: Any) -> Any:
    """Return the built-in class from which a class of exceptions derives."""
    return next((each for each in kind.__mro__ if each.__module__ == "builtins"), kind)


def _error(kind: type, arguments: Sequence[Any], attributes: Mapping[str, Any]) -> BaseException:
    """Return an exception without its traceback. No code of its class is run, except what is written in C."""
    base = _builtin_of(kind)
    if not issubclass(base, BaseException):
        raise OpaqueError
    try:
        found: BaseException = base.__new__(kind, *arguments)
        base.__init__(found, *arguments)
    except Exception as error:  # a built-in class that checks its arguments
        raise OpaqueError from error
    vars(found).update(attributes)
    return found


def _filled(target: Any, content: Any) -> Any:
    target[:] = content
    return target
