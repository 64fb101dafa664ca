"""Bytes between vaults: small frames, and segments as pieces with checksums.

A frame is its length (4 bytes, big-endian) and a header as JSON (`headers`). Ranges of a segment are sent as pieces of up to
`PIECE_BYTES`, each after its length and CRC-32. An empty piece at the end says whether the segment was overwritten meanwhile.
The checksum is computed before `sendfile` gives the same pages to the socket: the receiver detects pages that change later.

All sockets block, with timeouts of the kernel: a peer that neither reads nor answers for `TIMEOUT_S` is an `OSError`.
"""

import contextlib
import mmap
import os
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

from deadpool_run.errors import ProtocolError

TIMEOUT_S = 10.0
MAX_FRAME_BYTES = 64 << 10
PIECE_BYTES = 1 << 20
"""Small enough to stay in a core's cache between its checksum and its copy."""

Range = tuple[int, int]
"""The first byte, and the first byte after the range."""

_LENGTH = struct.Struct(">I")
_PIECE = struct.Struct("<II")
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


def send_frame(sock: socket.socket, body: bytes) -> None:
    """Send a frame. Raises OSError."""
    sock.sendall(_LENGTH.pack(len(body)) + body)


def receive_frame(sock: socket.socket, *, idle: Callable[[], bool] = lambda: False) -> bytes | None:
    """Return the next frame's body, or None if the peer hung up before it. Raises OSError and `ProtocolError`.

    `idle` is called after each `TIMEOUT_S` without a byte, and returns whether to wait longer.
    """
    head = bytearray(_LENGTH.size)
    while True:
        try:
            count = sock.recv_into(head)
            break
        except BlockingIOError:
            if not idle():
                raise
    if count == 0:
        return None
    receive_into(sock, memoryview(head)[count:])
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message between vaults of {length} bytes is longer than {MAX_FRAME_BYTES}")
    body = bytearray(length)
    receive_into(sock, memoryview(body))
    return bytes(body)


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fill `view`. Raises OSError, also if the peer hangs up or sends nothing for `TIMEOUT_S`."""
    while view:
        count = sock.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("the peer hung up in the middle of a message")
        view = view[count:]


def send_segment(  # noqa: PLR0913 - what is sent, where, and under which bounds
    sock: socket.socket,
    fd: int,
    ranges: Sequence[Range],
    *,
    still: Callable[[], bool],
    bucket: Bucket,
    meter: Meter,
    end: bool = True,
) -> Outcome:
    """Send these ranges of a file while `still` is true. Raises OSError.

    Returns `TORN` as soon as it is false. Without `end`, the caller sends the outcome with `end_segment`.
    """
    outcome = Outcome.WHOLE if still() else Outcome.TORN
    last = max((end for _, end in ranges), default=0)
    with mmap.mmap(fd, max(1, last), prot=mmap.PROT_READ) as mapped, memoryview(mapped) as view:
        for begin, upto in _pieces(ranges):
            if outcome is not Outcome.WHOLE:
                break
            bucket.take(upto - begin)
            with view[begin:upto] as piece:
                head = _PIECE.pack(upto - begin, zlib.crc32(piece))
            sock.sendall(head, socket.MSG_MORE)
            _send_file(sock, fd, begin, upto)
            meter.add(upto - begin)
            if not still():
                outcome = Outcome.TORN
    if end:
        end_segment(sock, outcome)
    return outcome


def end_segment(sock: socket.socket, outcome: Outcome) -> None:
    """Send the outcome of a segment, after its last piece. Raises OSError."""
    sock.sendall(_PIECE.pack(0, outcome))


def _pieces(ranges: Sequence[Range]) -> Iterator[Range]:
    for begin, end in ranges:
        for at in range(begin, end, PIECE_BYTES):
            yield at, min(at + PIECE_BYTES, end)


def _send_file(sock: socket.socket, fd: int, offset: int, end: int) -> None:
    while offset < end:
        count = os.sendfile(sock.fileno(), fd, offset, end - offset)
        if count == 0:
            raise OSError(f"a segment ends at byte {offset}, {end - offset} bytes early")
        offset += count


def receive_segment(sock: socket.socket, view: memoryview, meter: Meter, ranges: Sequence[Range]) -> Outcome:
    """Fill these ranges of `view`, which has the segment's size. Raises OSError and `ProtocolError`."""
    head = bytearray(_PIECE.size)
    outcome = Outcome.WHOLE
    pieces = _pieces(ranges)
    while True:
        receive_into(sock, memoryview(head))
        length, number = _PIECE.unpack(head)
        begin, end = next(pieces, (0, 0))
        if length == 0:
            break
        if length != end - begin:
            raise ProtocolError(f"a piece of {length} bytes where {end - begin} are due, at {begin} of {len(view)}")
        with view[begin:end] as piece:
            receive_into(sock, piece)
            if zlib.crc32(piece) != number:
                outcome = Outcome.DAMAGED
        meter.add(length)
    if number != Outcome.WHOLE:
        return Outcome.TORN
    if end:
        raise ProtocolError(f"a segment of {len(view)} bytes ended early, at {begin}")
    return outcome
