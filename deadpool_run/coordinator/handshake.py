"""Connections between agents, made and accepted: authenticated by the job's token before anything else is said.

Blocking, for threads: a caller is a thread anyway (it may have to wait for another machine), and whoever listens gives
each caller one for the moment of the greeting.
"""

import contextlib
import errno
import socket
import time

from deadpool_run.errors import ProtocolError
from deadpool_run.wire import auth
from deadpool_run.wire.auth import Caller, ConnectionRole, GreetingRefused, GreetingRefusedError, Listener, Welcome
from deadpool_run.wire.frames import Frames

TIMEOUT_S = 5.0
"""For a connection to be made, and then for the whole greeting: who says a byte now and then does not hold it open."""
_UNANSWERED_MS = 10_000
"""What the other side's kernel does not acknowledge for so long has been sent in vain: its machine is gone."""


def dial(address: str, port: int, role: ConnectionRole, token: bytes, timeout_s: float = TIMEOUT_S) -> socket.socket:
    """Return a blocking connection to an agent that has the token. Raises OSError, and `GreetingRefusedError` if it has not."""
    sock = socket.create_connection((address, port), timeout=timeout_s)
    try:
        _prepare(sock)
        caller = Caller(token, role)
        until = time.monotonic() + timeout_s
        sock.sendall(auth.encode(caller.hello))
        while (answer := caller.answer(_read(sock, until))) is not None:
            sock.sendall(auth.encode(answer))
        sock.settimeout(None)
    except EOFError as error:
        sock.close()
        why = f"{address}:{port} hung up while it was greeted: an agent that ends, or another program"
        raise ConnectionResetError(errno.ECONNRESET, why) from error
    except ProtocolError as error:
        sock.close()
        raise GreetingRefusedError(f"{address}:{port} does not greet as an agent of deadpool-run: {error}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def receive(sock: socket.socket, token: bytes, timeout_s: float = TIMEOUT_S) -> ConnectionRole | None:
    """Greet whoever has connected, and return what it wants; None, and the connection closed, if it is none of ours."""
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


def _read(sock: socket.socket, until: float) -> auth.Word:
    """Return the next word, without a byte beyond it: what follows is not ours to read. Raises TimeoutError, among others."""
    frames = Frames(auth.MAX_BYTES)
    while True:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the greeting takes too long")
        sock.settimeout(left_s)
        data = sock.recv(min(frames.missing, auth.MAX_BYTES))
        if not data:
            raise EOFError("it hung up")
        for body in frames.feed(data):
            return auth.decode(body)
