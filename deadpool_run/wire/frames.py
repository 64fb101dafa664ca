"""Frames of a byte stream: a 4-byte big-endian length, then the body, such as a message as JSON. No sockets here.

Between agents, a tag follows after the body (`wire.seal`). The length does not count it.
"""

import struct
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from deadpool_run.errors import ProtocolError
from deadpool_run.wire import typed
from deadpool_run.wire.seal import TAG_BYTES, Seal

T = TypeVar("T")
_LENGTH = struct.Struct(">I")


def pack(body: bytes, limit: int) -> bytes:
    """Return the body as one frame. Raises `ProtocolError` if it has more than `limit` bytes."""
    if len(body) > limit:
        raise ProtocolError(f"a frame of {len(body)} bytes is over the limit of {limit}: {body[:40]!r}")
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[T]):
    """Cuts a byte stream into bodies of up to `limit` bytes, and decodes them. Holds one frame and one read at most.

    With a seal, no frame is decoded whose tag is wrong.
    """

    def __init__(self, limit: int, decode: Callable[[bytes], T], seal: Seal | None = None) -> None:
        self._limit = limit
        self._decode = decode
        self._seal = seal
        self._tag_bytes = 0 if seal is None else TAG_BYTES
        self._bytes = bytearray()

    @property
    def missing(self) -> int:
        """Bytes to read until the current frame, or at first its length, is complete. Never 0."""
        if len(self._bytes) < _LENGTH.size:
            return _LENGTH.size - len(self._bytes)
        (length,) = _LENGTH.unpack_from(self._bytes)
        return int(_LENGTH.size + length + self._tag_bytes - len(self._bytes))

    @property
    def is_empty(self) -> bool:
        """Whether no byte waits for the rest of its frame."""
        return not self._bytes

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield every message that is complete with `data`. Raises `ProtocolError`."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > self._limit:
                raise ProtocolError(f"a frame of {length} bytes is over the limit of {self._limit}")
            end = _LENGTH.size + length
            if len(self._bytes) < end + self._tag_bytes:
                return
            frame, tag = bytes(self._bytes[:end]), bytes(self._bytes[end : end + self._tag_bytes])
            del self._bytes[: end + self._tag_bytes]
            if self._seal is not None:
                self._seal.check(frame, tag)
            yield self._decode(frame[_LENGTH.size :])


class MessageFormat(Generic[T]):
    """Messages of one union as frames of up to `limit` bytes."""

    def __init__(self, kind: Any, name: str, limit: int) -> None:
        """Prepare both ways. `name` says in errors what was expected."""
        self._limit = limit
        self._decoder: typed.Decoder[T] = typed.Decoder(kind, name)

    def encode(self, message: T) -> bytes:
        """Return the message as one frame. Raises `ProtocolError` if it is too large."""
        return pack(typed.to_json(message), self._limit)

    def decode(self, body: bytes) -> T:
        """Return the message of one frame's body. Raises `ProtocolError`."""
        return self._decoder.decode(body)

    def frames(self, seal: Seal | None = None) -> Frames[T]:
        """Return a new cutter of a stream of these messages."""
        return Frames(self._limit, self.decode, seal)
