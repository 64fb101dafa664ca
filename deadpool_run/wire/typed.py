"""Dataclasses as JSON and back, checked against their annotations: what comes from a file or a network is not trusted.

Known are numbers, text, booleans, enumerations, None, tuples and mappings from text, and dataclasses of these.
"""

from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from deadpool_run.errors import ProtocolError


def encode(thing: Any) -> dict[str, Any]:
    """Return a dataclass as values that JSON knows; `type` names its class."""
    return {"type": type(thing).__name__, **asdict(thing)}


def decode(kinds: Mapping[str, type[Any]], parts: Mapping[str, Any]) -> Any:
    """Return what `encode` was given, if it is one of these classes. Raises `ProtocolError`."""
    rest = dict(parts)
    try:
        return build(kinds[rest.pop("type")], rest)
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"not one of {', '.join(kinds)}: {str(parts)[:200]}") from error


def build(kind: Any, parts: Mapping[str, Any]) -> Any:
    """Return the dataclass with these fields. Raises ValueError, KeyError or TypeError."""
    if not isinstance(parts, Mapping):
        raise TypeError(f"{str(parts)[:80]} is no {kind.__name__}")
    hints = _hints(kind)
    if set(parts) != {field.name for field in fields(kind)}:
        raise ValueError(f"a {kind.__name__} with fields {sorted(parts)}")
    return kind(**{name: _value(hints[name], value) for name, value in parts.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, value: Any) -> Any:
    if isinstance(hint, NewType):
        return _value(hint.__supertype__, value)
    origin = get_origin(hint)
    if origin in (UnionType, Union):
        return None if value is None else _value(next(arm for arm in get_args(hint) if arm is not NoneType), value)
    if origin is tuple:
        return _tuple(get_args(hint), value)
    if origin is dict:
        if not isinstance(value, Mapping):
            raise TypeError(f"{str(value)[:80]} is no mapping")
        _, inner = get_args(hint)
        return {str(key): item if inner is Any else _value(inner, item) for key, item in value.items()}
    return _single(hint, value)


def _single(hint: Any, value: Any) -> Any:
    if is_dataclass(hint):
        return build(hint, value)
    if issubclass(hint, Enum):
        return hint(value)
    if not isinstance(value, (hint, int) if hint is float else hint) or (hint is not bool and isinstance(value, bool)):
        raise TypeError(f"{value!r} is no {hint.__name__}")
    return value


def _tuple(hints: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{value!r} is no list")
    if hints[-1:] == (...,):
        return tuple(_value(hints[0], item) for item in value)
    return tuple(_value(hint, item) for hint, item in zip(hints, value, strict=True))
