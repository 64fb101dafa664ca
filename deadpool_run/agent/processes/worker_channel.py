"""The agent's end of a control socket: frames of `wire.messages`, never blocking."""

import array
import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from deadpool_run.errors import ProtocolError
from deadpool_run.wire.messages import FrameBuffer, Message, encode

_READ_BYTES = 64 << 10
MAX_UNSENT_BYTES = 8 << 20
"""A worker that lets this much wait for it is broken: orders are few, and the largest is one `Assign`."""


class WorkerChannel:
    """One control socket. Calls back from the running loop; `on_broken` says why nothing more can be exchanged."""

    def __init__(
        self, sock: socket.socket, on_message: Callable[[Message], None], on_broken: Callable[[str], None]
    ) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_message = on_message
        self._on_broken = on_broken
        self._loop = asyncio.get_running_loop()
        self._frames = FrameBuffer()
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._loop.add_reader(sock, self._read)

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Queue the message; the descriptors are duplicated and go with its first byte."""
        if self._sock.fileno() < 0:
            return
        self._unsent.append((memoryview(encode(message)), [os.dup(fd) for fd in fds]))
        self._write()
        if sum(len(data) for data, _ in self._unsent) > MAX_UNSENT_BYTES:
            self._break(f"it does not read: {MAX_UNSENT_BYTES} bytes of orders wait for it")

    def read_rest(self) -> None:
        """Take in what the peer sent before it ended."""
        while self._sock.fileno() >= 0 and self._read():
            pass

    def close(self) -> None:
        """Let go. The peer reads an end of file."""
        if self._sock.fileno() < 0:
            return
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        self._sock.close()
        while self._unsent:
            for fd in self._unsent.popleft()[1]:
                os.close(fd)

    def _read(self) -> bool:
        try:
            data = self._sock.recv(_READ_BYTES)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            data = b""
        if not data:  # the process's end is told by its pidfd; one that merely closed its descriptors may live on
            self.close()
            return False
        try:
            for message in self._frames.feed(data):
                self._on_message(message)
        except ProtocolError as error:
            self._break(str(error))
            return False
        return True

    def _write(self) -> None:
        while self._unsent:
            data, fds = self._unsent[0]
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            try:
                sent = self._sock.sendmsg([data], rights)
            except BlockingIOError:
                self._loop.add_writer(self._sock, self._write)
                return
            except (BrokenPipeError, ConnectionResetError):
                self.close()
                return
            for fd in fds:
                os.close(fd)
            if sent < len(data):
                self._unsent[0] = (data[sent:], [])
            else:
                self._unsent.popleft()
        self._loop.remove_writer(self._sock)

    def _break(self, why: str) -> None:
        self.close()
        self._on_broken(why)
