"""Bytes between vaults: sockets with timeouts, small frames, and the limit and count of bytes.

A frame is its length (4 bytes, big-endian), a header as JSON (`headers`) and a tag (`wire.tags`). Chunks follow as in `exchange`.

All sockets block, with timeouts of the kernel: a peer that neither reads nor answers for `TIMEOUT_S` is an `OSError`.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum

from deadpool_run.errors import ProtocolError
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.tags import TAG_BYTES

TIMEOUT_S = 10.0
MAX_FRAME_BYTES = 64 << 10
_LENGTH = struct.Struct(">I")
_TIMEVAL = struct.Struct("@ll")
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_RATE_S = 5


class Outcome(IntEnum):
    """How a segment arrived."""

    WHOLE = 0
    TORN = 1
    """It changed while it was sent."""
    DAMAGED = 2
    """Its bytes are not those that the sender read."""


class Bucket:
    """Limits the bytes per second of all threads that share it, in the order in which they ask."""

    def __init__(self, bytes_per_s: int | None, closing: threading.Event) -> None:
        self._rate = bytes_per_s
        self._closing = closing
        self._lock = threading.Lock()
        self._next = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until `nbytes` bytes may be sent, or until closing."""
        if self._rate is None:
            return
        now = time.monotonic()
        with self._lock:
            turn = max(now, self._next)
            self._next = turn + nbytes / self._rate
        self._closing.wait(turn - now)


class Meter:
    """Counts bytes, and their rate over the last seconds. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.total = 0
        """Bytes so far."""
        self._seconds: dict[int, int] = {}

    def add(self, nbytes: int) -> None:
        """Count bytes now."""
        second = int(time.monotonic())
        with self._lock:
            self.total += nbytes
            self._seconds[second] = self._seconds.get(second, 0) + nbytes
            for old in [each for each in self._seconds if each < second - _RATE_S]:
                del self._seconds[old]

    def rate(self) -> float:
        """Return the bytes per second over the last whole seconds."""
        now = int(time.monotonic())
        with self._lock:
            return sum(n for second, n in self._seconds.items() if now - _RATE_S <= second < now) / _RATE_S


def prepare(sock: socket.socket) -> None:
    """Set the socket's timeouts, and keepalive to detect a peer that vanishes."""
    sock.setblocking(True)
    limit = _TIMEVAL.pack(int(TIMEOUT_S), int(TIMEOUT_S % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    if sock.family in {socket.AF_INET, socket.AF_INET6}:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut_down(sock: socket.socket) -> None:
    """End every wait on the socket, in any thread; its own thread closes it."""
    with contextlib.suppress(OSError):  # it is closed, or was never connected
        sock.shutdown(socket.SHUT_RDWR)


def receive_frame(connection: PeerConnection, *, idle: Callable[[], bool] = lambda: False) -> bytes | None:
    """Return the next frame's body, or None if the peer hung up before it. Raises OSError and `ProtocolError`.

    `idle` is called after each `TIMEOUT_S` without a byte, and returns whether to wait longer.
    """
    head = bytearray(_LENGTH.size)
    while True:
        try:
            count = connection.sock.recv_into(head)
            break
        except BlockingIOError:
            if not idle():
                raise
    if count == 0:
        return None
    receive_into(connection.sock, memoryview(head)[count:])
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message between vaults of {length} bytes is longer than {MAX_FRAME_BYTES}")
    body = receive_exactly(connection.sock, length)
    _check(connection, bytes(head) + body)
    return body


def receive_tagged(connection: PeerConnection, nbytes: int) -> bytes:
    """Return the next bytes, which were sent with `PeerConnection.send`. Raises OSError and `ProtocolError`."""
    body = receive_exactly(connection.sock, nbytes)
    _check(connection, body)
    return body


def _check(connection: PeerConnection, frame: bytes) -> None:
    connection.receiving.check(frame, receive_exactly(connection.sock, TAG_BYTES))


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`. Raises OSError, also if the peer hangs up or sends nothing for `TIMEOUT_S`."""
    at = 0
    while at < len(view):
        count = sock.recv_into(view[at:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("the peer hung up in the middle of a message")
        at += count


def receive_exactly(sock: socket.socket, nbytes: int) -> bytes:
    """Return the next bytes. Raises OSError."""
    body = bytearray(nbytes)
    receive_into(sock, memoryview(body))
    return bytes(body)
