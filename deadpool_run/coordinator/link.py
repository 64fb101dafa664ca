"""One connection between a node's agent and the coordinator's: messages of `wire.peers`, and signs of life.

Both sides say something at least every fifth of the time-out. A connection that is closed is told at once; one that is
silent, once nothing was heard for the time-out.
"""

import asyncio
import contextlib
import socket
from collections import deque
from collections.abc import Callable

from deadpool_run.errors import ProtocolError
from deadpool_run.wire.frames import Frames
from deadpool_run.wire.peers import MAX_FRAME_BYTES, Beat, Message, decode, encode

_READ_BYTES = 256 << 10
MAX_UNSENT_BYTES = 64 << 20
"""A peer that lets this much wait for it is as good as silent."""
BEATS = 5
"""Signs of life per time-out."""


class Link:
    """An authenticated connection, used in the running loop.

    `on_message` is told every message but empty beats; `on_lost` is told once why it ended, and whether the other side's kernel
    closed it (its process has ended) or it merely fell silent. `beat` makes the sign of life.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        timeout_s: float,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str, bool], None],
        beat: Callable[[], Beat] = Beat,
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._timeout_s = timeout_s
        self._on_message = on_message
        self._on_lost = on_lost
        self._beat = beat
        self._loop = asyncio.get_running_loop()
        self._frames = Frames(MAX_FRAME_BYTES)
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._heard_at = self._loop.time()
        self._flushed: asyncio.Event | None = None
        self._loop.add_reader(sock, self._read)
        self._timer = self._loop.call_later(timeout_s / BEATS, self._tick)

    @property
    def open(self) -> bool:
        """Whether anything can still be said."""
        return self._sock.fileno() >= 0

    def send(self, message: Message) -> None:
        """Queue the message; nothing happens if the connection has ended."""
        if not self.open:
            return
        data = encode(message)
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

    def close(self) -> None:
        """Hang up; `on_lost` is not called."""
        if not self.open:
            return
        self._timer.cancel()
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        self._unsent.clear()
        if self._flushed is not None:
            self._flushed.set()

    def _tick(self) -> None:
        silent_s = self._loop.time() - self._heard_at
        if silent_s > self._timeout_s:
            self._lose(f"nothing was heard of it for {silent_s:.1f} s", closed=False)
            return
        self._timer = self._loop.call_later(self._timeout_s / BEATS, self._tick)
        self.send(self._beat())

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
        now = self._loop.time()
        if now - self._heard_at > self._timeout_s:
            self._lose(f"nothing was heard of it for {now - self._heard_at:.1f} s", closed=False)  # we were frozen
            return
        self._heard_at = now
        try:
            for body in self._frames.feed(data):
                message = decode(body)
                if message != Beat():
                    self._on_message(message)
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

    def _lose(self, why: str, *, closed: bool) -> None:
        if self.open:
            self.close()
            self._on_lost(why, closed)
