"""The agent's one port for other agents. Connections without the job's token are refused here."""

import asyncio
import socket
from collections.abc import Callable

from deadpool_run.coordinator import handshake
from deadpool_run.wire.auth import ConnectionRole

_BACKLOG = 1024
_MAX_GREETINGS = 256
"""At once; further connections wait in the backlog."""
_ACCEPT_AGAIN_S = 0.05


class PeerServer:
    """Accepts, greets, and hands the connection (blocking, authenticated) over, in the running loop."""

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
        self._greetings: dict[asyncio.Task[ConnectionRole | None], socket.socket] = {}
        self._closed = False
        self._listen()

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
        for greeting in self._greetings:
            greeting.cancel()

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

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
            self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
            return
        greeting = self._loop.create_task(handshake.receive(sock, self._token))
        self._greetings[greeting] = sock
        greeting.add_done_callback(self._greeted)

    def _greeted(self, greeting: asyncio.Task[ConnectionRole | None]) -> None:
        if len(self._greetings) >= _MAX_GREETINGS:
            self._listen()
        sock = self._greetings.pop(greeting)
        if self._closed or greeting.cancelled():
            sock.close()
        elif (role := greeting.result()) is not None:
            self._on_peer(role, sock)
