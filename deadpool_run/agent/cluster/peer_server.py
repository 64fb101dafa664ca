"""The agent's one port for other agents. Connections without the job's token are refused here."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable

from deadpool_run.coordinator import handshake
from deadpool_run.wire.auth import ConnectionRole

_BACKLOG = 1024
_MAX_GREETINGS = 256
"""At once; further connections wait in the backlog."""
_ACCEPT_AGAIN_S = 0.05


class PeerServer:
    """Accepts, greets in a thread, and hands the connection (blocking, authenticated) over in the running loop."""

    def __init__(
        self, listener: socket.socket, token: bytes, on_peer: Callable[[ConnectionRole, socket.socket], None]
    ) -> None:
        """Serve on a bound socket, and own it."""
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        self._token = token
        self._on_peer = on_peer
        self._loop = asyncio.get_running_loop()
        self._greetings: dict[threading.Thread, socket.socket] = {}
        self._closed = False
        self._loop.add_reader(listener, self._accept)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Accept no more connections, and cut greetings that are under way."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for thread, sock in list(self._greetings.items()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            thread.join()

    def _accept(self) -> None:
        if len(self._greetings) >= _MAX_GREETINGS:
            self._loop.remove_reader(self._listener)  # until a greeting ends
            return
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is free, or the caller has gone: accept again later
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_ACCEPT_AGAIN_S, self._listen_again)
            return
        thread = threading.Thread(target=self._greet, args=(sock,), name="deadpool-greeting", daemon=True)
        self._greetings[thread] = sock
        thread.start()

    def _listen_again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _greet(self, sock: socket.socket) -> None:
        role = handshake.receive(sock, self._token)
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._greeted, threading.current_thread(), role, sock)

    def _greeted(self, thread: threading.Thread, role: ConnectionRole | None, sock: socket.socket) -> None:
        full = len(self._greetings) >= _MAX_GREETINGS
        self._greetings.pop(thread, None)
        thread.join()  # it has nothing more to do
        if full:
            self._listen_again()
        if role is None:
            return
        if self._closed:
            sock.close()
        else:
            self._on_peer(role, sock)
