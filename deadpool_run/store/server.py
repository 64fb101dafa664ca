"""The store's server: one thread, one loop, only the job's own clients.

A connection is served once it is known that a process of this user, or of root, has its other end. If the other end is on this
machine, the kernel knows that. Else the agent is asked, which asks the agent of the caller's machine. Until then not one byte of
it is read.
"""

import contextlib
import secrets
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deadpool_run.errors import ProtocolError
from deadpool_run.store.key_values import KeyValues
from deadpool_run.store.requests import RequestStream
from deadpool_run.store.socket_owner import Address, SocketOwners, may_use_store
from deadpool_run.wire.messages import FORMAT, Message, encode
from deadpool_run.wire.stores import CallersIdentified, IdentifyCallers, StoreCaller, StoreRefused

_READ_BYTES = 256 << 10
_ACCEPTS_AT_ONCE = 128
MAX_UNKNOWN = 1024
"""Connections whose users are asked for at once; further ones wait in the backlog."""
ANSWER_S = 30.0
_ACCEPT_AGAIN_S = 0.05
_NO_PROCESS = "no process of the job's user on that machine made it"


@dataclass(eq=False, slots=True)
class _Client:
    """A connection that is served."""

    sock: socket.socket
    address: Address
    requests: RequestStream = field(default_factory=RequestStream)
    unsent: bytearray = field(default_factory=bytearray)


class StoreServer:
    """Serves on a listening socket until the agent closes its end of `control`, from which it takes its answers."""

    def __init__(self, listener: socket.socket, control: socket.socket, answer_s: float = ANSWER_S) -> None:
        """Own both sockets. `answer_s` is the limit for an answer about a caller. Later it is refused, and may call again."""
        listener.setblocking(False)
        self._answer_s = answer_s
        self._listener, self._control = listener, control
        self._answers = FORMAT.frames()
        self._values: KeyValues[_Client] = KeyValues(self._answer)
        self._owners = SocketOwners()
        self._unknown: dict[int, tuple[socket.socket, Address, float]] = {}
        """Connections whose users are not known yet, by number, with their callers and the time when they count as refused."""
        self._questions: list[StoreCaller] = []
        self._refused: list[tuple[str, str]] = []
        """Callers, and why they were refused, that the agent does not know of yet."""
        # An answer to an earlier process of the store names no connection of this one.
        self._number = secrets.randbits(48)
        self._accept_again_at = 0.0
        self._is_open = True
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], None]] = {}
        self._watch(listener, self._accept)
        self._watch(control, self._hear)

    def serve(self) -> None:
        """Serve until the agent closes its end."""
        while self._is_open:
            for fd, events in self._epoll.poll(self._timeout_s()):
                if (handler := self._handlers.get(fd)) is not None:
                    handler(events)
            self._expire()
            self._tell_agent()

    # --- callers --------------------------------------------------------------------------------------------------

    def _accept(self, _events: int) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            if len(self._unknown) >= MAX_UNKNOWN:
                self._pause()
                return
            try:
                sock, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # no descriptor is free, or the caller has gone
                self._pause()
                return
            self._greet(sock, (str(address[0]), int(address[1])))

    def _pause(self) -> None:
        """Accept nothing for a moment."""
        self._epoll.modify(self._listener, 0)
        self._accept_again_at = time.monotonic() + _ACCEPT_AGAIN_S

    def _greet(self, sock: socket.socket, caller: Address) -> None:
        sock.setblocking(False)
        called = sock.getsockname()
        owner = self._owners.uid(caller, (called[0], called[1]))
        if owner is None:
            self._number += 1
            self._unknown[self._number] = sock, caller, time.monotonic() + self._answer_s
            self._questions.append(StoreCaller(self._number, *caller))
        elif may_use_store(owner):
            self._admit(sock, caller)
        else:
            self._refuse(sock, caller, f"its process belongs to user {owner}")

    def _admit(self, sock: socket.socket, caller: Address) -> None:
        with contextlib.suppress(OSError):  # it has gone already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(sock, caller)
        self._watch(sock, lambda events: self._serve(client, events))

    def _refuse(self, sock: socket.socket, caller: Address, reason: str) -> None:
        """Close the connection, and count it unless the caller has hung up: then it may have been a process that was killed."""
        hung_up = select.poll()
        hung_up.register(sock, select.POLLRDHUP)
        if not hung_up.poll(0):
            self._refused.append((caller[0], reason))
        sock.close()

    def _expire(self) -> None:
        now = time.monotonic()
        if self._accept_again_at and now >= self._accept_again_at:
            self._accept_again_at = 0.0
            self._epoll.modify(self._listener, select.EPOLLIN)
        while self._unknown:
            number, (sock, caller, limit) = next(iter(self._unknown.items()))  # the oldest
            if now < limit:
                return
            del self._unknown[number]
            self._refuse(sock, caller, f"its machine did not answer within {self._answer_s:g} s")

    def _timeout_s(self) -> float | None:
        limits = [limit for _, _, limit in list(self._unknown.values())[:1]]
        if self._accept_again_at:
            limits.append(self._accept_again_at)
        return max(0.0, min(limits) - time.monotonic()) if limits else None

    # --- the agent ------------------------------------------------------------------------------------------------

    def _tell_agent(self) -> None:
        """Ask for callers and report refused ones, all of a turn of the loop together."""
        if self._questions:
            host, port = self._listener.getsockname()[:2]
            self._send(IdentifyCallers(host, port, tuple(self._questions)))
            self._questions.clear()
        if self._refused:
            self._send(StoreRefused(len(self._refused), *self._refused[-1]))
            self._refused.clear()

    def _send(self, message: Message) -> None:
        try:
            self._control.sendall(encode(message))
        except OSError:
            self._is_open = False

    def _hear(self, _events: int) -> None:
        try:
            data = self._control.recv(_READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._is_open = False
        for message in self._answers.feed(data):
            if not isinstance(message, CallersIdentified):
                raise ProtocolError(f"the store received the unexpected message {type(message).__name__}")
            for number in self._unknown.keys() & {*message.known, *message.unknown}:
                sock, caller, _ = self._unknown.pop(number)
                if number in message.known:
                    self._admit(sock, caller)
                else:
                    self._refuse(sock, caller, _NO_PROCESS)

    # --- clients --------------------------------------------------------------------------------------------------

    def _serve(self, client: _Client, events: int) -> None:
        if events & select.EPOLLOUT:
            self._flush(client)
        if not events & ~select.EPOLLOUT:
            return
        try:
            data = client.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._hang_up(client)
            return
        try:
            for request in client.requests.feed(data):
                self._values.handle(client, request)
        except ProtocolError as error:
            self._refused.append((client.address[0], str(error)))
            self._hang_up(client)

    def _hang_up(self, client: _Client) -> None:
        del self._handlers[client.sock.fileno()]
        client.sock.close()
        self._values.forget(client)

    def _answer(self, client: _Client, data: bytes) -> None:
        if not client.unsent:
            try:
                data = data[client.sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # it has gone, which is the next event
            if data:  # until it has read that, nothing more is read from it
                self._epoll.modify(client.sock, select.EPOLLOUT)
        client.unsent += data

    def _flush(self, client: _Client) -> None:
        try:
            del client.unsent[: client.sock.send(client.unsent)]
        except BlockingIOError:
            return
        except OSError:
            client.unsent.clear()
        if not client.unsent:
            self._epoll.modify(client.sock, select.EPOLLIN)

    def _watch(self, sock: socket.socket, handler: Callable[[int], None]) -> None:
        self._handlers[sock.fileno()] = handler
        self._epoll.register(sock, select.EPOLLIN)
