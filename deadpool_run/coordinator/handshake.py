"""Connections between agents: dialled or accepted, then authenticated by the job's token (`wire.auth`)."""

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import AsyncIterator

from deadpool_run.errors import ProtocolError
from deadpool_run.wire import auth
from deadpool_run.wire.auth import Caller, ConnectionRole, GreetingRefused, GreetingRefusedError, Listener, Welcome

TIMEOUT_S = 5.0
"""Limit for making a connection, and again for the whole greeting."""
_UNANSWERED_MS = 10_000
"""A connection breaks when the peer's kernel acknowledges nothing for this long: its machine is gone."""


async def connect(
    address: str, port: int, role: ConnectionRole, token: bytes, timeout_s: float = TIMEOUT_S
) -> socket.socket:
    """Return a blocking connection to an agent that has the token. Raises OSError and `GreetingRefusedError`."""
    loop, where = asyncio.get_running_loop(), f"{address}:{port}"
    with contextlib.ExitStack() as unless_greeted:
        sock = unless_greeted.enter_context(socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET))
        sock.setblocking(False)
        try:
            async with _limited(timeout_s, f"{where} did not accept the connection"):
                await loop.sock_connect(sock, (address, port))
        except ConnectionRefusedError as error:  # without asyncio's words
            raise OSError(error.errno, os.strerror(errno.ECONNREFUSED)) from error
        _prepare(sock)
        caller = Caller(token, role)
        try:
            async with _limited(timeout_s, f"{where} did not end the greeting"):
                await loop.sock_sendall(sock, auth.encode(caller.hello))
                while (answer := caller.answer(await _read(sock))) is not None:
                    await loop.sock_sendall(sock, auth.encode(answer))
        except EOFError as error:
            why = f"{where} closed the connection during the greeting: its agent is ending, or another program listens there"
            raise ConnectionResetError(errno.ECONNRESET, why) from error
        except ProtocolError as error:
            raise GreetingRefusedError(f"{where} does not answer as an agent of deadpool-run does: {error}") from error
        sock.setblocking(True)
        unless_greeted.pop_all()
    return sock


def dial(address: str, port: int, role: ConnectionRole, token: bytes, timeout_s: float = TIMEOUT_S) -> socket.socket:
    """Do as `connect`, where no event loop runs."""
    return asyncio.run(connect(address, port, role, token, timeout_s))


async def receive(sock: socket.socket, token: bytes, timeout_s: float = TIMEOUT_S) -> ConnectionRole | None:
    """Greet a caller and return its role, with the connection blocking; None, with it closed, if it is no agent of this job."""
    loop, listener = asyncio.get_running_loop(), Listener(token)
    sock.setblocking(False)
    try:
        _prepare(sock)
        async with asyncio.timeout(timeout_s):
            while True:
                answer = listener.answer(await _read(sock))
                await loop.sock_sendall(sock, auth.encode(answer))
                if isinstance(answer, GreetingRefused):
                    break
                if isinstance(answer, Welcome):
                    sock.setblocking(True)
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


async def _read(sock: socket.socket) -> auth.Greeting:
    """Return the next message without a byte beyond it, which belongs to the role. Raises OSError, EOFError and `ProtocolError`."""
    frames = auth.FORMAT.frames()
    while True:
        data = await asyncio.get_running_loop().sock_recv(sock, min(frames.missing, auth.MAX_BYTES))
        if not data:
            raise EOFError("the peer closed the connection")
        for message in frames.feed(data):
            return message


@contextlib.asynccontextmanager
async def _limited(timeout_s: float, late: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, f"{late} within {timeout_s:g} s") from None
