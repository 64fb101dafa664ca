"""Messages both ways over a non-blocking stream socket, in the running loop."""

import array
import asyncio
import itertools
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from deadpool_run.errors import ProtocolError, TamperedError
from deadpool_run.wire.frames import MessageFormat
from deadpool_run.wire.seal import Seal

T = TypeVar("T")
_LOG = logging.getLogger("deadpool_run")
_READ_BYTES = 256 << 10
_FRAMES_AT_ONCE = 128
"""Pieces in one system call, of frames and tags; Linux takes up to 1,024."""
_LINGER_S = 5.0


class MessageStream(Generic[T]):
    """One connection with its queue of unsent frames. All frames of one turn of the loop are written together, after it.

    `on_message` may raise `ProtocolError`. `on_end` is called once with the reason, unless `close` was called before: a
    `ProtocolError` of the peer, ConnectionResetError if it closed the connection or something tampered with it, else another
    OSError.
    """

    def __init__(  # noqa: PLR0913 - what it reads, writes and tells
        self,
        sock: socket.socket,
        message_format: MessageFormat[T],
        max_unsent_bytes: int,
        on_message: Callable[[T], None],
        on_end: Callable[[Exception], None],
        *,
        sending: Seal | None = None,
        receiving: Seal | None = None,
    ) -> None:
        """Begin to read. More than `max_unsent_bytes` in the queue end the connection: the peer does not read.

        Between agents, the seals tag every frame.
        """
        sock.setblocking(False)
        self._sock = sock
        self._fd = sock.fileno()
        """For the loop, which would describe a socket object in an exception, with two system calls, and drop that."""
        self._max_unsent_bytes = max_unsent_bytes
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._encode, self._frames = message_format.encode, message_format.frames(receiving)
        self._sending = sending
        self._unsent: deque[tuple[bytes | memoryview, list[int]]] = deque()
        self._unsent_bytes = 0
        self._scheduled = False
        self._waits_for_room = False
        self._closing = False
        self._loop.add_reader(self._fd, self._read)

    @property
    def open(self) -> bool:
        """Whether frames can still be sent."""
        return self._sock.fileno() >= 0

    def send(self, message: T, fds: Sequence[int] = ()) -> None:
        """Queue the message, unless the connection has ended. Duplicates of the descriptors go with its first byte."""
        if self.open:
            self.send_frame(self._encode(message), fds)

    def send_frame(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Queue an encoded message, as `send` does."""
        if not self.open:
            return
        self._unsent.append((frame, [os.dup(fd) for fd in fds]))
        self._unsent_bytes += len(frame)
        if self._sending is not None:  # a piece of its own: many connections share an encoded frame
            tag = self._sending.tag(frame)
            self._unsent.append((tag, []))
            self._unsent_bytes += len(tag)
        if self._unsent_bytes > self._max_unsent_bytes:
            self._write()
            if self._unsent_bytes > self._max_unsent_bytes:
                self._end(TimeoutError(f"it does not read: {self._unsent_bytes} bytes wait for it"))
        elif not (self._scheduled or self._waits_for_room):
            self._scheduled = True
            self._loop.call_soon(self._write)

    def push(self) -> None:
        """Write queued frames now, and not after this turn of the loop."""
        if self._scheduled:
            self._write()

    def read_rest(self) -> None:
        """Receive what the peer sent before it ended."""
        while self.open and self._read():
            pass

    def close_when_flushed(self) -> None:
        """Send the queued frames, then close. Nothing more is received, and a peer that does not read is closed after a while."""
        if not self.open:
            return
        self._loop.remove_reader(self._fd)
        if not self._unsent:
            self.close()
            return
        self._closing = True
        self._loop.call_later(_LINGER_S, self.close)

    def close(self) -> None:
        """Write what there is room for, and close. The peer reads an end of file; `on_end` is not called."""
        if self._scheduled and not self._closing:
            self._closing = True
            self._write()
        if not self.open:
            return
        self._loop.remove_reader(self._fd)
        self._loop.remove_writer(self._fd)
        self._sock.close()
        self._drop_unsent()

    def _read(self) -> bool:
        """Receive what there is, up to a bound; return whether there may be more."""
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._end(type(error)(f"its connection broke: {error.strerror}"))
            return False
        if not data:
            self._end(ConnectionResetError("its connection was closed"))
            return False
        self._handle(data)
        return self.open

    def _handle(self, data: bytes) -> None:
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
                if not self.open:
                    return
        except TamperedError as error:
            _LOG.warning("closing a connection between agents: %s", error)
            self._end(ConnectionResetError(f"its connection broke: {error}"))
        except ProtocolError as error:
            self._end(ProtocolError(f"it broke the protocol: {error}"))

    def _write(self) -> None:
        self._scheduled = False
        while self._unsent and self.open:
            fds = self._unsent[0][1]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            batch = [self._unsent[0][0]]
            if not fds:
                following = itertools.islice(self._unsent, 1, _FRAMES_AT_ONCE)
                batch += [frame for frame, _ in itertools.takewhile(lambda each: not each[1], following)]
            try:
                sent = self._sock.sendmsg(batch, rights)
            except BlockingIOError:
                if not self._waits_for_room:
                    self._waits_for_room = True
                    self._loop.add_writer(self._fd, self._write)
                return
            except OSError:
                break  # the peer has ended, and what it sent before is still to be read
            _close_all(fds)
            self._unsent_bytes -= sent
            for frame in batch:
                if sent < len(frame):
                    self._unsent[0] = (memoryview(frame)[sent:], [])
                    break
                sent -= len(frame)
                self._unsent.popleft()
        self._unsent_bytes = 0
        if self._waits_for_room:
            self._waits_for_room = False
            self._loop.remove_writer(self._fd)
        self._drop_unsent()
        if self._closing:
            self.close()

    def _drop_unsent(self) -> None:
        while self._unsent:
            _close_all(self._unsent.popleft()[1])

    def _end(self, why: Exception) -> None:
        if self.open:
            self.close()
            self._on_end(why)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
