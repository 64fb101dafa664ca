"""The agent's one port for other agents. Connections without the job's token are refused here, and counted."""

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable

from deadpool_run.agent.refusals import Refusals
from deadpool_run.transport.handshake import Greeting
from deadpool_run.wire.auth import ConnectionRole, Credentials, GreetingRefusedError
from deadpool_run.wire.peer_connection import PeerConnection

_BACKLOG = 1024
_MAX_GREETINGS = 256
"""At once; further connections wait in the backlog."""
_UNDISTURBED_S = 0.5
"""A greeting that takes longer loses its place where others wait. Agents need milliseconds."""
_ACCEPT_AGAIN_S = 0.05


class PeerServer:
    """Accepts, greets, and hands the connection (blocking, authenticated) over, in the running loop."""

    def __init__(
        self,
        listener: socket.socket,
        credentials: Credentials,
        on_peer: Callable[[ConnectionRole, PeerConnection], None],
    ) -> None:
        """Serve on a bound socket, and own it."""
        listener.listen(_BACKLOG)
        listener.setblocking(False)
        self._listener = listener
        self.credentials = credentials
        """Used for every greeting that begins from now on."""
        self.refusals = Refusals()
        self._on_peer = on_peer
        self._loop = asyncio.get_running_loop()
        self._greetings: dict[Greeting, tuple[str, float]] = {}
        """Each with the caller's address, and when it began. The oldest is the first."""
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
        self.refusals.close()
        for greeting in self._greetings:
            greeting.cut()
        self._greetings.clear()

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        """Greet all callers that wait, as far as there are places."""
        if len(self._greetings) >= _MAX_GREETINGS:
            self._loop.remove_reader(self._listener)  # until a greeting ends
            self._make_room()
            return
        while len(self._greetings) < _MAX_GREETINGS:
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is free, or the caller has gone: accept again later
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_ACCEPT_AGAIN_S, self._listen)
                return
            with contextlib.suppress(OSError):  # the caller has gone
                greeting = Greeting(sock, self.credentials, self._greeted)
                self._greetings[greeting] = str(address[0]), self._loop.time()

    def _make_room(self) -> None:
        """Cut the oldest greeting of the source that has the most, as soon as it has had its time. Others may end before."""
        if self._closed or len(self._greetings) < _MAX_GREETINGS:
            return
        crowd, _ = Counter(source for source, _ in self._greetings.values()).most_common(1)[0]
        oldest, since = next((each, since) for each, (source, since) in self._greetings.items() if source == crowd)
        if self._loop.time() < since + _UNDISTURBED_S:
            self._loop.call_at(since + _UNDISTURBED_S, self._make_room)
            return
        oldest.cut()
        self._remove(oldest)
        self.refusals.add(crowd, "it did not end the greeting, and others waited")

    def _greeted(self, greeting: Greeting) -> None:
        source = self._remove(greeting)
        try:
            role, connection = greeting.result()
        except GreetingRefusedError as error:
            self.refusals.add(source, str(error))
        except OSError:
            pass  # the caller has closed the connection
        else:
            self._on_peer(role, connection)

    def _remove(self, greeting: Greeting) -> str:
        """Free a greeting's place; return the caller's address."""
        if len(self._greetings) >= _MAX_GREETINGS:
            self._listen()
        source, _ = self._greetings.pop(greeting)
        return source
