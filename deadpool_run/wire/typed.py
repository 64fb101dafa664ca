"""Dataclasses as JSON and back, checked against their annotations: what comes from a file or a network is not trusted.

Known are numbers, text, booleans, enumerations, None, tuples, frozen sets, mappings, and dataclasses of these. A mapping
whose keys are not text becomes a list of pairs.
"""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from deadpool_run.errors import ProtocolError


def encode(thing: Any) -> dict[str, Any]:
    """Return a dataclass as values that JSON knows; `type` names its class."""
    return {"type": type(thing).__name__, **_fields(thing)}


def plain(value: Any) -> Any:
    """Return any known value as values that JSON knows."""
    if value is None or isinstance(value, str | int | float):
        return value
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: plain(item) for key, item in value.items()}
        return [[plain(key), plain(item)] for key, item in value.items()]
    if isinstance(value, frozenset):
        return [plain(item) for item in sorted(value)]
    return [plain(item) for item in value]


def _fields(thing: Any) -> dict[str, Any]:
    kind: Any = type(thing)
    return {name: plain(getattr(thing, name)) for name in _names(kind)}


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


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
    if parts.keys() != set(_names(kind)):
        raise ValueError(f"a {kind.__name__} with fields {sorted(parts)}")
    return kind(**{name: _value(hints[name], value) for name, value in parts.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _value(hint: Any, value: Any) -> Any:
    origin, arms = get_origin(hint), get_args(hint)
    if hint is Any:
        result = value
    elif isinstance(hint, NewType):
        result = _value(hint.__supertype__, value)
    elif origin in (UnionType, Union):
        result = None if value is None else _value(next(arm for arm in arms if arm is not NoneType), value)
    elif origin is tuple:
        result = _tuple(arms, value)
    elif origin is frozenset:
        result = frozenset(_tuple((arms[0], ...), value))
    elif origin in (dict, Mapping):
        result = _mapping(arms[0], arms[1], value)
    else:
        result = _single(hint, value)
    return result


def _mapping(key_hint: Any, hint: Any, value: Any) -> dict[Any, Any]:
    if key_hint is str and not isinstance(value, Mapping):
        raise TypeError(f"{str(value)[:80]} is no mapping")
    pairs = value.items() if isinstance(value, Mapping) else _tuple((tuple[Any, Any], ...), value)
    return {_value(key_hint, key): item if hint is Any else _value(hint, item) for key, item in pairs}


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
