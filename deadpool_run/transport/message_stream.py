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
from deadpool_run.wire.frames import MessageFormat, bundles
from deadpool_run.wire.tags import Tagger

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
        sending: Tagger | None = None,
        receiving: Tagger | None = None,
    ) -> None:
        """Begin to read. More than `max_unsent_bytes` in the queue end the connection: the peer does not read.

        Between agents, a tagger tags what is written together.
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
        self._untagged: list[bytes] = []
        """Frames that get their tag when they are written."""
        self._unsent: deque[tuple[bytes | memoryview, list[int]]] = deque()
        self._unsent_bytes = 0
        self._scheduled = False
        self._waits_for_room = False
        self._closing = False
        self._loop.add_reader(self._fd, self._read)

    @property
    def open(self) -> bool:
        """Whether frames can still be sent."""
        return self._fd >= 0

    def send(self, message: T, fds: Sequence[int] = ()) -> None:
        """Queue the message, unless the connection has ended. Duplicates of the descriptors go with its first byte."""
        if self.open:
            self.send_frame(self._encode(message), fds)

    def send_frame(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Queue an encoded message, as `send` does."""
        if not self.open:
            return
        if self._sending is None:
            self._unsent.append((frame, [os.dup(fd) for fd in fds]))
        else:
            self._untagged.append(frame)
        self._unsent_bytes += len(frame)
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
        if not (self._unsent or self._untagged):
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
        self._fd = -1
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
        if self._untagged:
            self._tag_frames()
        while self._unsent and self.open:
            batch, fds = self._next()
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
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

    def _next(self) -> tuple[list[bytes | memoryview], list[int]]:
        """Return what to write in one system call: one piece with its descriptors, or several that have none."""
        first, fds = self._unsent[0]
        batch = [first]
        if not fds:
            for piece, its_fds in itertools.islice(self._unsent, 1, _FRAMES_AT_ONCE):
                if its_fds:
                    break
                batch.append(piece)
        return batch, fds

    def _tag_frames(self) -> None:
        """Tag the frames of this turn. A tag is a piece of its own: many connections share an encoded frame."""
        assert self._sending is not None
        frames, self._untagged = self._untagged, []
        self._unsent_bytes -= sum(map(len, frames))
        for piece in bundles(frames):
            tag = self._sending.tag(piece)
            self._unsent += ((piece, []), (tag, []))
            self._unsent_bytes += len(piece) + len(tag)

    def _drop_unsent(self) -> None:
        self._untagged.clear()
        while self._unsent:
            _close_all(self._unsent.popleft()[1])

    def _end(self, why: Exception) -> None:
        if self.open:
            self.close()
            self._on_end(why)


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
