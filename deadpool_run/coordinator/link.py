"""One connection between two agents: messages of `wire.peers`, never blocking.

It tells at once when the other side's end of it is closed. That the other side is silent is for those to find who know what
is to be heard when.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable

from deadpool_run.errors import ProtocolError
from deadpool_run.wire.frames import Frames
from deadpool_run.wire.peers import MAX_FRAME_BYTES, Message, decode, encode

_READ_BYTES = 256 << 10
MAX_UNSENT_BYTES = 64 << 20
"""A peer that lets this much wait for it is as good as silent."""
_LINGER_S = 5.0


class PeerLink:
    """An authenticated connection, used in the running loop.

    `on_message` is told every message, and `on_lost` once, why it ended, and whether the other side closed it: then its process
    has ended, or it has said so before.
    """

    def __init__(
        self, sock: socket.socket, on_message: Callable[[Message], None], on_lost: Callable[[str, bool], None]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_message = on_message
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(MAX_FRAME_BYTES)
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._flushed: asyncio.Event | None = None
        self._closing = False
        self._loop.add_reader(sock, self._read)

    @property
    def open(self) -> bool:
        """Whether anything can still be said."""
        return self._sock.fileno() >= 0

    def send(self, message: Message) -> None:
        """Queue the message; nothing happens if the connection has ended."""
        if self.open:
            self.send_encoded(encode(message))

    def send_encoded(self, data: bytes) -> None:
        """Queue a message that `wire.peers.encode` has made, for one that goes to many."""
        if not self.open:
            return
        self._unsent.append(memoryview(data))
        self._unsent_bytes += len(data)
        self._write()
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self._lose(f"it does not read: {self._unsent_bytes} bytes wait for it", closed=False)

    async def flush(self, timeout_s: float) -> None:
        """Wait until all that was said is on its way, or the time is over."""
        if self._unsent and self.open:
            self._flushed = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._flushed.wait(), timeout_s)

    def close_when_flushed(self) -> None:
        """Say what is left to say and hang up; nothing is heard any more. What the other side never takes is dropped in the end."""
        if not self.open:
            return
        self._loop.remove_reader(self._sock)
        if not self._unsent:
            self.close()
            return
        self._closing = True
        self._loop.call_later(_LINGER_S, self.close)

    def close(self) -> None:
        """Hang up; `on_lost` is not called."""
        if not self.open:
            return
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._unsent.clear()
        if self._flushed is not None:
            self._flushed.set()

    def _read(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(f"its connection broke: {error.strerror}", closed=isinstance(error, ConnectionResetError))
            return
        if not data:
            self._lose("its connection was closed", closed=True)
            return
        try:
            for body in self._frames.feed(data):
                self._on_message(decode(body))
                if not self.open:
                    return
        except ProtocolError as error:
            self._lose(f"it is confused: {error}", closed=False)

    def _write(self) -> None:
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent[0])
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._write)
                return
            except OSError:
                break  # what it said before its end is still to be read
            self._unsent_bytes -= sent
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
            else:
                self._unsent.popleft()
        self._unsent.clear()
        self._unsent_bytes = 0
        self._loop.remove_writer(self._sock)
        if self._flushed is not None:
            self._flushed.set()
        if self._closing:
            self.close()

    def _lose(self, why: str, *, closed: bool) -> None:
        if self.open:
            self.close()
            self._on_lost(why, closed)
