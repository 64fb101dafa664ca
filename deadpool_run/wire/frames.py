"""Frames of a byte stream: a 4-byte big-endian length, then the body, such as a message as JSON. No sockets here.

Between agents, a tag follows after the body (`wire.tags`). The length does not count it. Frames that are written together may
share a tag, as a bundle: a length with the highest bit set, so many bytes of whole frames, and the tag.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from deadpool_run.errors import ProtocolError
from deadpool_run.wire import typed
from deadpool_run.wire.tags import TAG_BYTES, Tagger

T = TypeVar("T")
_LENGTH = struct.Struct(">I")
_BUNDLE = 1 << 31
BUNDLE_BYTES = 64 << 10
"""Most bytes of a bundle. A larger frame has a tag of its own."""


def pack(body: bytes, limit: int) -> bytes:
    """Return the body as one frame. Raises `ProtocolError` if it has more than `limit` bytes."""
    if len(body) > limit:
        raise ProtocolError(f"a frame of {len(body)} bytes is over the limit of {limit}: {body[:40]!r}")
    return _LENGTH.pack(len(body)) + body


def bundles(frames: Iterable[bytes]) -> Iterator[bytes]:
    """Yield what gets one tag each: as many of these frames as one bundle may hold, or one frame as it is."""
    together: list[bytes] = []
    size = 0
    for frame in frames:
        if together and size + len(frame) > BUNDLE_BYTES:
            yield _bundle(together, size)
            together, size = [], 0
        together.append(frame)
        size += len(frame)
    if together:
        yield _bundle(together, size)


def _bundle(frames: list[bytes], size: int) -> bytes:
    return frames[0] if len(frames) == 1 else _LENGTH.pack(_BUNDLE | size) + b"".join(frames)


class Frames(Generic[T]):
    """Cuts a byte stream into bodies of up to `limit` bytes, and decodes them. Holds one frame or bundle, and one read, at most.

    With a tagger, no frame is decoded whose tag is wrong. Only then there are bundles.
    """

    def __init__(self, limit: int, decode: Callable[[bytes], T], tagger: Tagger | None = None) -> None:
        self._limit = limit
        self._decode = decode
        self._tagger = tagger
        self._tag_bytes = 0 if tagger is None else TAG_BYTES
        self._bytes = bytearray()

    @property
    def missing(self) -> int:
        """Bytes to read until the current frame or bundle, or at first its length, is complete. Never 0."""
        if len(self._bytes) < _LENGTH.size:
            return _LENGTH.size - len(self._bytes)
        return self._size()[0] - len(self._bytes)

    @property
    def is_empty(self) -> bool:
        """Whether no byte waits for the rest of its frame."""
        return not self._bytes

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield every message that is complete with `data`. Raises `ProtocolError`."""
        self._bytes += data
        while len(self._bytes) >= _LENGTH.size:
            size, is_bundle = self._size()
            if len(self._bytes) < size:
                return
            frame = bytes(self._bytes[: size - self._tag_bytes])
            if self._tagger is not None:
                self._tagger.check(frame, bytes(self._bytes[size - self._tag_bytes : size]))
            del self._bytes[:size]
            if is_bundle:
                yield from self._unbundled(frame)
            else:
                yield self._decode(frame[_LENGTH.size :])

    def _size(self) -> tuple[int, bool]:
        """Return the bytes of the current frame or bundle with its tag, and whether it is a bundle. Raises `ProtocolError`."""
        (length,) = _LENGTH.unpack_from(self._bytes)
        limit, is_bundle = self._limit, False
        if length & _BUNDLE and self._tagger is not None:
            length, limit, is_bundle = length ^ _BUNDLE, BUNDLE_BYTES, True
        if length > limit:
            raise ProtocolError(f"a frame of {length} bytes is over the limit of {limit}")
        return _LENGTH.size + length + self._tag_bytes, is_bundle

    def _unbundled(self, bundle: bytes) -> Iterator[T]:
        """Yield the messages of a bundle. Raises `ProtocolError`."""
        begin = _LENGTH.size
        while begin < len(bundle):
            if begin + _LENGTH.size > len(bundle):
                raise ProtocolError("a bundle ends within a frame")
            (length,) = _LENGTH.unpack_from(bundle, begin)
            begin += _LENGTH.size
            if length > min(self._limit, len(bundle) - begin):
                raise ProtocolError(
                    f"a frame of {length} bytes is over the limit of {self._limit}, or ends after its bundle"
                )
            yield self._decode(bundle[begin : begin + length])
            begin += length


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

    def frames(self, tagger: Tagger | None = None) -> Frames[T]:
        """Return a new cutter of a stream of these messages."""
        return Frames(self._limit, self.decode, tagger)
