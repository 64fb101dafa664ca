"""Connections between agents: dialled or accepted, then authenticated by the job's token (`wire.auth`).

These functions block and run in threads. A caller may have to wait for another machine, and a listener greets each caller in a
thread of its own.
"""

import asyncio
import contextlib
import errno
import socket
import time

from deadpool_run.errors import ProtocolError
from deadpool_run.wire import auth
from deadpool_run.wire.auth import Caller, ConnectionRole, GreetingRefused, GreetingRefusedError, Listener, Welcome
from deadpool_run.wire.frames import Frames

TIMEOUT_S = 5.0
"""Limit for making a connection, and again for the whole greeting."""
_UNANSWERED_MS = 10_000
"""A connection breaks when the peer's kernel acknowledges nothing for this long: its machine is gone."""


def dial(address: str, port: int, role: ConnectionRole, token: bytes, timeout_s: float = TIMEOUT_S) -> socket.socket:
    """Return a blocking connection to an agent that has the token. Raises OSError and `GreetingRefusedError`."""
    with contextlib.ExitStack() as unless_greeted:
        sock = unless_greeted.enter_context(socket.create_connection((address, port), timeout=timeout_s))
        try:
            _prepare(sock)
            caller = Caller(token, role)
            until = time.monotonic() + timeout_s
            sock.sendall(auth.encode(caller.hello))
            while (answer := caller.answer(_read(sock, until))) is not None:
                sock.sendall(auth.encode(answer))
            sock.settimeout(None)
        except EOFError as error:
            why = f"{address}:{port} closed the connection during the greeting: its agent is ending, or another program listens there"
            raise ConnectionResetError(errno.ECONNRESET, why) from error
        except ProtocolError as error:
            why = f"{address}:{port} does not answer as an agent of deadpool-run does: {error}"
            raise GreetingRefusedError(why) from error
        unless_greeted.pop_all()
    return sock


def receive(sock: socket.socket, token: bytes, timeout_s: float = TIMEOUT_S) -> ConnectionRole | None:
    """Greet a caller and return its role. None, with the connection closed, if it is not an agent of this job."""
    listener = Listener(token)
    until = time.monotonic() + timeout_s
    try:
        _prepare(sock)
        while True:
            answer = listener.answer(_read(sock, until))
            sock.sendall(auth.encode(answer))
            if isinstance(answer, GreetingRefused):
                break
            if isinstance(answer, Welcome):
                sock.settimeout(None)
                return listener.role
    except (OSError, EOFError, ProtocolError):
        pass
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)  # so that a refusal is read before the end
    sock.close()
    return None


def _prepare(sock: socket.socket) -> None:
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


def _read(sock: socket.socket, until: float) -> auth.Greeting:
    """Return the next message without a byte beyond it, which belongs to the role. Raises OSError, EOFError and `ProtocolError`."""
    frames = Frames(auth.MAX_BYTES)
    while True:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the greeting took too long")
        sock.settimeout(left_s)
        data = sock.recv(min(frames.missing, auth.MAX_BYTES))
        if not data:
            raise EOFError("the peer closed the connection")
        for body in frames.feed(data):
            return auth.decode(body)


async def connect(
    address: str, port: int, role: ConnectionRole, token: bytes, timeout_s: float = TIMEOUT_S
) -> socket.socket:
    """As `dial`, in a thread. A call that is cancelled leaves no connection behind."""

    def close(dialled: asyncio.Future[socket.socket]) -> None:
        if not dialled.cancelled() and dialled.exception() is None:
            dialled.result().close()

    dialled = asyncio.get_running_loop().run_in_executor(None, dial, address, port, role, token, timeout_s)
    try:
        return await asyncio.shield(dialled)
    except asyncio.CancelledError:
        dialled.add_done_callback(close)
        raise
