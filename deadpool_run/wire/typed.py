"""Dataclasses as JSON and back, checked against their annotations: what comes from a file or a network is not trusted.

Known are numbers, text, booleans, enumerations, None, tuples and other sequences, frozen sets, mappings, and dataclasses
of these. A mapping whose keys are not text becomes a list of pairs.

Annotations are read once: each class has its own encoder and decoder, made when it is first met. A coordinator of ten
thousand nodes does little else than this.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from deadpool_run.errors import ProtocolError
from deadpool_run.wire.frames import pack, to_json

_Decoder = Callable[[Any], Any]
_Kind = Any  # a class; what `cache` is given must be hashable, which mypy does not know of classes


def encode(thing: Any) -> dict[str, Any]:
    """Return a dataclass as values that JSON knows; `type` names its class."""
    return {"type": type(thing).__name__, **_fields(thing)}


def plain(value: Any) -> Any:
    """Return any known value as values that JSON knows."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if is_dataclass(value):
        return _fields(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: plain(item) for key, item in value.items()}
        return [[plain(key), plain(item)] for key, item in value.items()]
    return [plain(item) for item in (sorted(value) if isinstance(value, frozenset) else value)]


def _fields(thing: Any) -> dict[str, Any]:
    kind: _Kind = type(thing)
    return _encoder(kind)(thing)


@cache
def _encoder(kind: Any) -> Callable[[Any], dict[str, Any]]:
    """Return what makes a JSON object of the class: fields that are fit for JSON as they are cost nothing more."""
    names, hints = _names(kind), _hints(kind)
    others = [name for name in names if not _is_json(hints[name])]
    read = attrgetter(*names) if len(names) > 1 else None

    def values(thing: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = read(thing) if read is not None else tuple(getattr(thing, name) for name in names)
        return found

    def encoder(thing: Any) -> dict[str, Any]:
        parts = dict(zip(names, values(thing), strict=True))
        for name in others:
            parts[name] = plain(parts[name])
        return parts

    return encoder


def _is_json(hint: Any) -> bool:
    """Tell whether JSON knows every value with this annotation as it is."""
    if isinstance(hint, NewType):
        return _is_json(hint.__supertype__)
    origin, arms = get_origin(hint), get_args(hint)
    if origin in (UnionType, Union, tuple):
        return all(arm in (NoneType, ...) or _is_json(arm) for arm in arms)
    if origin is dict:
        return arms == (str, Any)  # somebody made it of what JSON knows already
    return isinstance(hint, type) and issubclass(hint, str | int | float)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def decode(kinds: Mapping[str, type[Any]], parts: Mapping[str, Any]) -> Any:
    """Return what `encode` was given, if it is one of these classes. Raises `ProtocolError`."""
    rest = dict(parts)
    try:
        kind: _Kind = kinds[rest.pop("type")]
        return _builder(kind)(rest)
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolError(f"not one of {', '.join(kinds)}: {str(parts)[:200]}") from error


def frame(thing: Any, limit: int) -> bytes:
    """Return a dataclass as one frame of JSON. Raises `ProtocolError` if it is longer than `limit` bytes."""
    return pack(to_json(encode(thing)).encode(), limit)


def unframe(kinds: Mapping[str, type[Any]], body: bytes) -> Any:
    """Return what `frame` was given, from the frame's body, if it is one of these classes. Raises `ProtocolError`."""
    try:
        parts = json.loads(body.decode())
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not one of {', '.join(kinds)}: {body[:80]!r}") from error
    if not isinstance(parts, dict):
        raise ProtocolError(f"not one of {', '.join(kinds)}: {body[:80]!r}")
    return decode(kinds, parts)


def build(kind: Any, parts: Mapping[str, Any]) -> Any:
    """Return the dataclass with these fields. Raises ValueError, KeyError or TypeError."""
    return _builder(kind)(parts)


@cache
def _builder(kind: Any) -> _Decoder:
    hints = _hints(kind)
    names = frozenset(_names(kind))
    decoders = [(name, _decoder(hints[name])) for name in _names(kind)]

    def builder(parts: Any) -> Any:
        if not isinstance(parts, dict) and not isinstance(parts, Mapping):
            raise TypeError(f"{str(parts)[:80]} is no {kind.__name__}")
        if parts.keys() != names:
            raise ValueError(f"a {kind.__name__} with fields {sorted(parts)}")
        return kind(**{name: decoder(parts[name]) for name, decoder in decoders})

    return builder


def _decoder(hint: Any) -> _Decoder:
    """Return what checks a value against the annotation, and makes of it what the annotation says."""
    origin, arms = get_origin(hint), get_args(hint)
    if hint is Any:
        found: _Decoder = _as_it_is
    elif isinstance(hint, NewType):
        found = _decoder(hint.__supertype__)
    elif origin in (UnionType, Union):
        found = _optional(_decoder(next(arm for arm in arms if arm is not NoneType)))
    elif origin is tuple and arms[-1:] != (...,):
        found = _row([_decoder(arm) for arm in arms])
    elif origin in (tuple, Sequence):
        found = _many(arms[0])
    elif origin is frozenset:
        found = _set(_many(arms[0]))
    elif origin in (dict, Mapping):
        found = _mapping(arms[0] is str, _decoder(arms[0]), _decoder(arms[1]))
    elif is_dataclass(hint):
        found = _later(hint)
    elif issubclass(hint, Enum):
        found = hint
    else:
        found = _single(hint)
    return found


def _as_it_is(value: Any) -> Any:
    return value


def _later(kind: Any) -> _Decoder:
    """Return the class's decoder, which is made when it is needed: classes may be within themselves."""
    return lambda value: build(kind, value)


def _optional(decoder: _Decoder) -> _Decoder:
    return lambda value: None if value is None else decoder(value)


def _single(kind: type[Any]) -> _Decoder:
    """Check a number, a text or a boolean; an integer will do for a float, a boolean never for a number."""
    kinds = (kind, int) if kind is float else (kind,)

    def single(value: Any) -> Any:
        if type(value) is kind:
            return value
        if not isinstance(value, kinds) or (kind is not bool and isinstance(value, bool)):
            raise TypeError(f"{value!r} is no {kind.__name__}")
        return value

    return single


def _many(hint: Any) -> _Decoder:
    """Check any number of values of one kind: numbers, which there are most of, all at once."""
    kind = hint.__supertype__ if isinstance(hint, NewType) else hint
    flat = {kind} if kind in (int, str) else None
    decoder = _decoder(hint)

    def many(value: Any) -> tuple[Any, ...]:
        _check_list(value)
        if flat is not None and set(map(type, value)) <= flat:
            return tuple(value)
        return tuple(map(decoder, value))

    return many


def _row(decoders: list[_Decoder]) -> _Decoder:
    """Check as many values as there are decoders."""

    def row(value: Any) -> tuple[Any, ...]:
        _check_list(value)
        return tuple(decoder(item) for decoder, item in zip(decoders, value, strict=True))

    return row


def _set(many: _Decoder) -> _Decoder:
    return lambda value: frozenset(many(value))


def _mapping(is_text: bool, key: _Decoder, item: _Decoder) -> _Decoder:
    """Check a JSON object, or pairs."""
    pair = _row([_as_it_is, _as_it_is])

    def mapping(value: Any) -> dict[Any, Any]:
        if isinstance(value, Mapping):
            return {key(k): item(v) for k, v in value.items()}
        if is_text:
            raise TypeError(f"{str(value)[:80]} is no mapping")
        _check_list(value)
        return {key(k): item(v) for k, v in map(pair, value)}

    return mapping


def _check_list(value: Any) -> None:
    if not isinstance(value, list | tuple):
        raise TypeError(f"{value!r} is no list")
