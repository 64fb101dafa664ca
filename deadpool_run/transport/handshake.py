"""Connections between agents: dialled or accepted, then authenticated by the job's token (`wire.auth`).

Both sides name the called address as their end of the connection shows it. So an agent cannot be reached through a relay.
"""

import asyncio
import contextlib
import errno
import functools
import os
import socket
from collections.abc import AsyncIterator, Callable
from ipaddress import IPv6Address, ip_address

from deadpool_run.errors import ProtocolError
from deadpool_run.wire import auth
from deadpool_run.wire.auth import (
    Caller,
    ConnectionRole,
    Credentials,
    GreetingRefused,
    GreetingRefusedError,
    Listener,
)
from deadpool_run.wire.frames import Frames
from deadpool_run.wire.peer_connection import PeerConnection

TIMEOUT_S = 5.0
"""Limit for making a connection, and again for the whole greeting."""
_UNANSWERED_MS = 10_000
"""A connection breaks when the peer's kernel acknowledges nothing for this long: its machine is gone."""


async def connect(
    address: str, port: int, role: ConnectionRole, credentials: Credentials, timeout_s: float = TIMEOUT_S
) -> PeerConnection:
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
        except (ValueError, OverflowError) as error:  # from a peer's message
            raise OSError(errno.EINVAL, f"{where!r} is no address") from error
        _prepare(sock)
        caller = Caller(credentials, role, _name(sock.getpeername()))
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
    return PeerConnection(sock, *caller.taggers())


def dial(
    address: str, port: int, role: ConnectionRole, credentials: Credentials, timeout_s: float = TIMEOUT_S
) -> PeerConnection:
    """Do as `connect`, where no event loop runs."""
    return asyncio.run(connect(address, port, role, credentials, timeout_s))


class Greeting:
    """A caller that is being greeted, in the running loop, with one reader and one timer: a leader greets thousands at once.

    `on_over` is called once with this greeting, unless it was cut: `result` then returns how it ended.
    """

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        on_over: "Callable[[Greeting], None]",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Begin with a socket that was accepted, and own it. Raises OSError if the caller has gone: then the socket is closed."""
        self._sock, self._on_over, self._timeout_s = sock, on_over, timeout_s
        self._failed: Exception | None = None
        self._loop = asyncio.get_running_loop()
        try:
            sock.setblocking(False)
            _prepare(sock)
            self._listener = Listener(credentials, _name(sock.getsockname()))
        except OSError:
            sock.close()
            raise
        self._frames = auth.FORMAT.frames()
        self._fd = sock.fileno()
        self._loop.add_reader(self._fd, self._read)
        self._expiry = self._loop.call_later(timeout_s, self._expire)

    def result(self) -> tuple[ConnectionRole, PeerConnection]:
        """Return the caller's role, and the connection, which blocks.

        Raises `GreetingRefusedError` if the caller is no agent of this job, and OSError if it has closed the connection.
        """
        if self._failed is not None:
            raise self._failed
        return self._listener.role, PeerConnection(self._sock, *self._listener.taggers())

    def cut(self) -> None:
        """End it without a result."""
        self._forget()
        _refuse(self._sock)

    def _read(self) -> None:
        try:
            if not _answer_what_came(self._sock, self._listener, self._frames):
                return
        except EOFError as error:
            self._fail(ConnectionResetError(errno.ECONNRESET, str(error)))
        except ProtocolError as error:
            self._fail(GreetingRefusedError(f"it is no agent of deadpool-run: {error}"))
        except (OSError, GreetingRefusedError) as error:
            self._fail(error)
        else:
            self._forget()
            self._sock.setblocking(True)
            self._on_over(self)

    def _expire(self) -> None:
        self._fail(GreetingRefusedError(f"it did not end the greeting within {self._timeout_s:g} s"))

    def _fail(self, why: Exception) -> None:
        self.cut()
        self._failed = why
        self._on_over(self)

    def _forget(self) -> None:
        self._expiry.cancel()
        self._loop.remove_reader(self._fd)


def _answer_what_came(sock: socket.socket, listener: Listener, frames: Frames[auth.Greeting]) -> bool:
    """Answer what there is to read; return whether the greeting is over. A caller waits for each answer."""
    try:
        data = sock.recv(auth.MAX_BYTES)
    except BlockingIOError:
        return False
    if not data:
        raise EOFError("the peer closed the connection")
    for message in frames.feed(data):
        answer = listener.answer(message)
        reply = auth.encode(answer)
        if sock.send(reply) < len(reply):  # there is room for much more than a greeting
            raise ConnectionResetError(errno.ECONNRESET, "the peer reads no answers")
        if isinstance(answer, GreetingRefused):
            raise GreetingRefusedError(answer.reason)
    if listener.is_over and not frames.is_empty:
        raise ProtocolError("it sent more than the greeting before the greeting had ended")
    return listener.is_over


def _refuse(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_WR)  # so that a refusal is read before the end
    sock.close()


def _name(address: tuple[str, int]) -> str:
    """Return a socket's address and port, the same from both ends: an IPv6 socket may have accepted an IPv4 connection."""
    host, port = address[:2]
    return f"{_literal(host)} port {port}"


@functools.lru_cache(maxsize=64)
def _literal(host: str) -> str:
    literal = ip_address(host.partition("%")[0])
    mapped = literal.ipv4_mapped if isinstance(literal, IPv6Address) else None
    return str(literal if mapped is None else mapped)


def _prepare(sock: socket.socket) -> None:
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)


async def _read(sock: socket.socket) -> auth.Greeting:
    """Return the next message without a byte beyond it, which belongs to the role. Raises OSError, EOFError and `ProtocolError`."""
    frames = auth.FORMAT.frames()
    while True:
        for message in frames.feed(await _received(sock, min(frames.missing, auth.MAX_BYTES))):
            return message


async def _received(sock: socket.socket, most: int) -> bytes:
    data = await asyncio.get_running_loop().sock_recv(sock, most)
    if not data:
        raise EOFError("the peer closed the connection")
    return data


@contextlib.asynccontextmanager
async def _limited(timeout_s: float, late: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise TimeoutError(errno.ETIMEDOUT, f"{late} within {timeout_s:g} s") from None
