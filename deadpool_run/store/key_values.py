"""Keys, values and waiting clients of a store, with the semantics of torch's TCPStore server. No sockets here."""

import re
import struct
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from deadpool_run.errors import ProtocolError
from deadpool_run.store.requests import Query, Request

C = TypeVar("C")
_U32, _U64, _I64 = struct.Struct("=I"), struct.Struct("=Q"), struct.Struct("=q")
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELLED = b"\0", b"\1"
_INTEGER = re.compile(rb"\s*([+-]?\d{1,19})")
"""An integer as `std::stoll` reads it."""
_INT64 = 1 << 64


class KeyValues(Generic[C]):
    """One store. `answer` is called with a client and the bytes for it: at once, or later if the client waits."""

    def __init__(self, answer: Callable[[C, bytes], None]) -> None:
        self._answer = answer
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, dict[C, None]] = {}
        """The clients that wait for a key, in the order in which they came."""
        self._awaited: dict[C, set[bytes]] = {}
        """The keys that a client still waits for."""

    def handle(self, client: C, request: Request) -> None:  # noqa: C901, PLR0912 - one case for each request
        """Carry out a client's request. Raises `ProtocolError` if it cannot be."""
        keys, values = request.keys, request.values
        match request.query:
            case Query.SET:
                self._set(keys[0], values[0])
            case Query.GET | Query.MULTI_GET:
                self._answer(client, b"".join(map(_sized, (self._values.get(key, b"") for key in keys))))
            case Query.ADD:
                self._answer(client, _I64.pack(self._add(keys[0], request.number)))
            case Query.WAIT:
                self._wait(client, keys)
            case Query.CHECK:
                self._answer(client, _READY if all(map(self._is_there, keys)) else _NOT_READY)
            case Query.MULTI_SET:
                for key, value in zip(keys, values, strict=True):
                    self._set(key, value)
            case Query.COMPARE_SET:
                self._answer(client, _sized(self._compare_set(keys[0], *values)))
            case Query.DELETE_KEY:
                self._answer(client, _I64.pack(self._values.pop(keys[0], None) is not None))
            case Query.APPEND:
                self._set(keys[0], self._values.get(keys[0], b"") + values[0])
            case Query.GETNUMKEYS:
                self._answer(client, _I64.pack(len(self._values)))
            case Query.LIST_KEYS:
                self._answer(client, _I64.pack(len(self._values)) + b"".join(map(_sized, self._values)))
            case Query.CANCEL_WAIT:
                self.forget(client)
                self._answer(client, _WAIT_CANCELLED)
            case Query.PING:
                self._answer(client, _U32.pack(request.number))
            case Query.BARRIER:
                self._barrier(client, keys[0], request.number)
            case Query.QUEUE_PUSH:
                self._queues.setdefault(keys[0], deque()).append(values[0])
                self._wake(keys[0], at_most=1)
            case Query.QUEUE_POP:
                self._answer(client, self._pop(keys[0]))
            case Query.QUEUE_LEN:
                self._answer(client, _I64.pack(len(self._queues.get(keys[0], ()))))
            case Query.VALIDATE:
                raise ProtocolError("it began twice")

    def forget(self, client: C) -> None:
        """End the client's wait, if it waits, without an answer."""
        for key in self._awaited.pop(client, ()):
            self._waiting[key].pop(client)
            if not self._waiting[key]:
                del self._waiting[key]

    def _is_there(self, key: bytes) -> bool:
        return key in self._values or bool(self._queues.get(key))

    def _set(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        self._wake(key)

    def _add(self, key: bytes, amount: int) -> int:
        total = (_integer(self._values.get(key, b"0")) + amount + _INT64 // 2) % _INT64 - _INT64 // 2
        self._set(key, b"%d" % total)
        return total

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> bytes:
        """Return the new value. If the key is missing and another value was expected, torch returns what was expected."""
        found = self._values.get(key)
        if found is None and expected:
            return expected
        if found is None or found == expected:
            self._set(key, desired)
            return desired
        return found

    def _wait(self, client: C, keys: Iterable[bytes]) -> None:
        missing = {key for key in keys if not self._is_there(key)}
        if missing:
            self._await(client, missing)
        else:
            self._answer(client, _STOP_WAITING)

    def _barrier(self, client: C, key: bytes, size: int) -> None:
        count = _integer(self._values.get(key, b"0")) + 1
        self._values[key] = b"%d" % count
        if count >= size:
            self._wake(key)
            self._answer(client, _STOP_WAITING)
        else:
            self._await(client, {key})

    def _pop(self, key: bytes) -> bytes:
        queue = self._queues.get(key)
        if not queue:
            return _I64.pack(0)
        answer = _I64.pack(len(queue)) + _sized(queue.popleft())
        if not queue:
            del self._queues[key]
        return answer

    def _await(self, client: C, keys: set[bytes]) -> None:
        self.forget(client)
        self._awaited[client] = keys
        for key in keys:
            self._waiting.setdefault(key, {})[client] = None

    def _wake(self, key: bytes, at_most: int | None = None) -> None:
        """End the wait of all clients for the key, or of the first `at_most`."""
        waiting = list(self._waiting.get(key, ()))
        for client in waiting[:at_most]:
            left = self._awaited[client]
            left.remove(key)
            del self._waiting[key][client]
            if not left:
                del self._awaited[client]
                self._answer(client, _STOP_WAITING)
        if waiting and not self._waiting[key]:
            del self._waiting[key]


def _sized(value: bytes) -> bytes:
    return _U64.pack(len(value)) + value


def _integer(value: bytes) -> int:
    found = _INTEGER.match(value)
    if found is None:
        raise ProtocolError(f"it counts with a key whose value is no integer: {value[:40]!r}")
    return int(found[1])
