"""Requests of torch's TCPStore clients, cut from a byte stream. No sockets here.

The format is that of torch 2.13 to 2.15 (`TCPStoreBackend.hpp` and `TCPStore.cpp`): a byte that names the request, then its fields.
Integers are in the machine's byte order; keys and values have their length before them, as 8 bytes.
"""

import struct
from collections.abc import Generator
from dataclasses import dataclass
from enum import IntEnum

from deadpool_run.errors import ProtocolError

MAX_KEY_BYTES, MAX_VALUE_BYTES, MAX_KEYS = 8 << 10, 8 << 20, 128 << 10
"""Torch's own limits."""
_MAGIC = 0x3C85F7CE
_U32, _U64, _I64 = struct.Struct("=I"), struct.Struct("=Q"), struct.Struct("=q")
_SPENT_BYTES = 64 << 10
"""Bytes that were read are dropped once there are more."""


class Query(IntEnum):
    """Names of requests, with torch's numbers."""

    VALIDATE = 0
    SET = 1
    COMPARE_SET = 2
    GET = 3
    ADD = 4
    CHECK = 5
    WAIT = 6
    GETNUMKEYS = 7
    DELETE_KEY = 8
    APPEND = 9
    MULTI_GET = 10
    MULTI_SET = 11
    CANCEL_WAIT = 12
    PING = 13
    QUEUE_PUSH = 14
    QUEUE_POP = 15
    QUEUE_LEN = 16
    LIST_KEYS = 17
    BARRIER = 18


_KEY_LISTS = frozenset({Query.CHECK, Query.WAIT, Query.MULTI_GET})
_WITHOUT_KEY = frozenset({Query.GETNUMKEYS, Query.CANCEL_WAIT, Query.PING, Query.LIST_KEYS})
"""Every other request has one key."""
_VALUES = {Query.SET: 1, Query.APPEND: 1, Query.QUEUE_PUSH: 1, Query.COMPARE_SET: 2}
_NUMBERS = {Query.ADD: _I64, Query.BARRIER: _I64, Query.PING: _U32}


@dataclass(frozen=True, slots=True)
class Request:
    """One request. Each has the fields that its query needs; the others are empty."""

    query: Query
    keys: tuple[bytes, ...] = ()
    values: tuple[bytes, ...] = ()
    number: int = 0
    """The amount to add, the size of a barrier's world, or a ping's number, which comes back."""


_Fields = Generator[None, None, bytes]
"""Yields while bytes are missing."""


class RequestStream:
    """Cuts one client's byte stream into requests, each as soon as it is complete."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._at = 0
        self._complete: list[Request] = []
        self._cutting = self._cut()

    def feed(self, data: bytes) -> list[Request]:
        """Return the requests that are complete with `data`. Raises `ProtocolError`, after which the stream is of no use."""
        self._bytes += data
        next(self._cutting)
        complete, self._complete = self._complete, []
        return complete

    def _cut(self) -> Generator[None, None, None]:
        if (yield from self._take(1)) != bytes([Query.VALIDATE]) or (yield from self._take(4)) != _U32.pack(_MAGIC):
            raise ProtocolError("it does not begin as a TCPStore client of torch 2.13 to 2.15")
        while True:
            (number,) = yield from self._take(1)
            try:
                query = Query(number)
            except ValueError:
                raise ProtocolError(f"its request {number} is unknown to torch 2.13 to 2.15") from None
            request = yield from self._request(query)
            self._complete.append(request)  # not in one line: `feed` may have taken the list meanwhile

    def _request(self, query: Query) -> Generator[None, None, Request]:
        if query is Query.VALIDATE:
            raise ProtocolError("it began twice")
        if query is Query.MULTI_SET:
            pairs = list[tuple[bytes, bytes]]()
            for _ in range((yield from self._count())):
                (key,) = yield from self._keys(1)
                pairs.append((key, (yield from self._value())))
            return Request(query, tuple(key for key, _ in pairs), tuple(value for _, value in pairs))
        keys = yield from self._keys((yield from self._count()) if query in _KEY_LISTS else query not in _WITHOUT_KEY)
        values = list[bytes]()
        for _ in range(_VALUES.get(query, 0)):
            values.append((yield from self._value()))
        number = 0
        if query in _NUMBERS:
            (number,) = _NUMBERS[query].unpack((yield from self._take(_NUMBERS[query].size)))
        return Request(query, keys, tuple(values), number)

    def _count(self) -> Generator[None, None, int]:
        (count,) = _U64.unpack((yield from self._take(8)))
        if count > MAX_KEYS:
            raise ProtocolError(f"it asked for {count} keys at once; torch's limit is {MAX_KEYS}")
        return int(count)

    def _keys(self, count: int) -> Generator[None, None, tuple[bytes, ...]]:
        keys = list[bytes]()
        while len(keys) < count:
            begin = self._at + _U64.size
            if len(self._bytes) >= begin:  # the rest of `_take`, spelt out: a request may have thousands of keys
                (size,) = _U64.unpack_from(self._bytes, self._at)
                if size > MAX_KEY_BYTES:
                    raise ProtocolError(f"a key has {size} bytes; torch's limit is {MAX_KEY_BYTES}")
                if len(self._bytes) >= begin + size:
                    self._at = begin + size
                    keys.append(bytes(self._bytes[begin : self._at]))
                    continue
            yield from self._more()
        return tuple(keys)

    def _value(self) -> _Fields:
        (size,) = _U64.unpack((yield from self._take(8)))
        if size > MAX_VALUE_BYTES:
            raise ProtocolError(f"a value has {size} bytes; torch's limit is {MAX_VALUE_BYTES}")
        return (yield from self._take(size))

    def _take(self, size: int) -> _Fields:
        while len(self._bytes) < self._at + size:
            yield from self._more()
        begin, self._at = self._at, self._at + size
        return bytes(self._bytes[begin : self._at])

    def _more(self) -> Generator[None, None, None]:
        if self._at == len(self._bytes) or self._at > _SPENT_BYTES:
            del self._bytes[: self._at]
            self._at = 0
        yield
