"""JSON of messages and their parts, and back, checked against the annotations of their classes.

Text from a file or a network is not trusted: every value is checked before anything sees it.
"""

import json
import threading
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from deadpool_run.errors import ProtocolError

T = TypeVar("T")


class _AnyMessage(msgspec.Struct):
    type: str


_ENCODER = msgspec.json.Encoder()
_MAKING = threading.Lock()
_made: dict[Any, "msgspec.json.Decoder[Any]"] = {}


def _decoder_of(kind: Any) -> "msgspec.json.Decoder[Any]":
    """Return msgspec's decoder of a class, made once, in one thread at a time: two that do so at once crash the process.

    msgspec then keeps its descriptions of the class and of all classes in it, which `convert` uses too.
    """
    if kind not in _made:
        with _MAKING:
            _made[kind] = msgspec.json.Decoder(kind)
    return _made[kind]


def to_json(thing: Any) -> bytes:
    """Return the shortest JSON text of a message, or of anything made of numbers, text, containers and dataclasses."""
    try:
        return _ENCODER.encode(thing)
    except (UnicodeEncodeError, OverflowError):  # text with lone surrogates, as of a path; an integer above 64 bits
        return json.dumps(to_plain(thing), separators=(",", ":")).encode()


def to_plain(thing: Any) -> Any:
    """Return the same as dicts, lists, text and numbers."""
    return msgspec.to_builtins(thing, str_keys=True)


def from_plain(kind: type[T], parts: Any) -> T:
    """Return what `to_plain` was given. Raises `ProtocolError`. Any thread."""
    _decoder_of(kind)
    try:
        return msgspec.convert(parts, kind, str_keys=True)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a {kind.__name__}: {error}") from error


def parse(text: bytes | str) -> Any:
    """Return what a JSON text from anywhere says, as dicts, lists, text and numbers. Raises `ProtocolError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # the latter: thousands of brackets
        raise ProtocolError(f"not JSON: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if it cannot be read, as another user's, or one that is incomplete."""
    try:
        found = parse(path.read_bytes())
    except (OSError, ProtocolError):
        return {}
    return found if isinstance(found, dict) else {}


class Decoder(Generic[T]):
    """Decodes the JSON of one class, or of a union of `Tagged` classes."""

    def __init__(self, kind: Any, name: str) -> None:
        """Prepare the decoder. `name` says in errors what was expected."""
        self._kind = kind
        self._name = name
        self._decoder: msgspec.json.Decoder[T] = _decoder_of(kind)

    def decode(self, text: bytes) -> T:
        """Return what `to_json` was given. Raises `ProtocolError`, which names the class and the field that is wrong."""
        try:
            return self._decoder.decode(text)
        except (ValueError, RecursionError) as error:
            return self._decode_slowly(text, error)

    def _decode_slowly(self, text: bytes, error: Exception) -> T:
        """Decode text with lone surrogates, which msgspec refuses; raise `ProtocolError` for any other."""
        if rb"\ud" in text.lower():
            try:
                return msgspec.convert(parse(text), self._kind, str_keys=True)  # type: ignore[no-any-return]
            except (ValueError, RecursionError, ProtocolError) as second:
                error = second
        raise ProtocolError(f"not {self._name}: {_class_named_in(text)}: {error}") from error


def _class_named_in(text: bytes) -> str:
    """Return the class that the text names, or the beginning of a text that names none."""
    try:
        return str(_decoder_of(_AnyMessage).decode(text).type[:80])
    except (ValueError, RecursionError):
        return repr(text[:80])
