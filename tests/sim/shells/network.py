"""Simulated machines and TCP between them. Streams keep their order, are late, stall in a cut, break, and lose tails."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, Self

from machine import Clock
from virtual_loop import VirtualLoop

_BUFFER_BYTES = 256 << 10
_UNANSWERED_S = 10.0
"""TCP_USER_TIMEOUT, as `handshake` sets it."""
_SYN_AGAIN_S = 1.0
Pair = tuple[str, str]


class Machine:
    """A host: its clock and its power."""

    def __init__(self, name: str, address: str, skew: float) -> None:
        self.name, self.address, self.skew = name, address, skew
        self.power = True
        self.pauses = 0
        """The number of faults that pause it now."""
        self.hears = False
        """Whether a pause stops only its processes, as `scontrol suspend` does. Its kernel still receives."""
        self.listeners: dict[int, SimSocket] = {}
        self.sockets: dict[SimSocket, None] = {}

    @property
    def paused(self) -> bool:
        return self.pauses > 0

    @property
    def runs(self) -> bool:
        return self.power and not self.paused


class Network:
    """All connections and their faults."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self.rng = clock, rng
        self.machines: dict[str, Machine] = {}
        self.cuts: Counter[Pair] = Counter()
        """For each direction, the number of faults that cut it now."""
        self.rejects: Counter[Pair] = Counter()
        """For each pair of machines, the number of faults that refuse connections now."""
        self.slow_until = 0.0
        self.flaky_until = 0.0
        """Until this time many new connections break, most of them in the greeting."""
        self.connections: list[tuple[SimSocket, SimSocket]] = []
        self._numbers = 1000
        self.resets = 0

    def add(self, name: str, skew: float) -> Machine:
        machine = self.machines[name] = Machine(name, f"10.0.0.{len(self.machines) + 1}", skew)
        return machine

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def linked(self, one: str, other: str) -> bool:
        """Tell whether two machines reach each other, in both directions."""
        return one == other or not (self.cuts[one, other] or self.cuts[other, one])

    def passes(self, source: Machine, target: Machine) -> bool:
        up = source.power and target.power and (target.hears or not target.paused)
        return up and not self.cuts[source.name, target.name]

    def latency(self) -> float:
        if self.clock.now < self.slow_until:
            return self.rng.uniform(0.05, 0.3)
        return self.rng.uniform(0.02, 0.2) if self.rng.random() < 0.01 else self.rng.uniform(0.0002, 0.003)

    def cut(self, pairs: Iterable[Pair], *, reject: bool = False) -> None:
        for pair in pairs:
            self.cuts[pair] += 1
            self.rejects[pair] += reject

    def heal(self, pairs: Iterable[Pair], *, reject: bool = False) -> None:
        for pair in pairs:
            self.cuts[pair] -= 1
            self.rejects[pair] -= reject
        self.retry()

    def retry(self) -> None:
        """Send stalled data again, after a link was healed or a machine woke up."""
        for pair in list(self.connections):
            for sock in pair:
                sock.retry()

    def reset(self, one: SimSocket, *, both: bool) -> None:
        """Break a connection, and lose the data on its way. Unless `both`, the other side notices it only when it sends."""
        self.resets += 1
        ends = [sock for sock in (one, one.peer) if sock is not None]
        for sock in ends:
            sock.lose_tail()
            sock.doomed = True
        for sock in ends if both else ends[:1]:
            self.clock.after(self.latency(), lambda sock=sock: sock.fail(errno.ECONNRESET))
        for sock in ends[1:]:
            if sock.keep_idle_s:  # its kernel asks after this silence
                self.clock.after(sock.keep_idle_s + 2 * self.latency(), lambda sock=sock: sock.fail(errno.ECONNRESET))

    def living(self) -> list[SimSocket]:
        """Return one end of each connection that is open at both ends."""
        self.connections = [pair for pair in self.connections if not (pair[0].done and pair[1].done)]
        return [one for one, other in self.connections if not (one.closed or other.closed or one.error or other.error)]

    def connect(self, sock: SimSocket, address: tuple[str, int]) -> None:
        """Send a SYN. If it arrives, the answer comes after a while."""
        machine = next(each for each in self.machines.values() if each.address == address[0])
        there, back = (sock.machine, machine), (machine, sock.machine)

        def arrive() -> None:
            if sock.done or not sock.connecting:
                return
            if self.rejects[there[0].name, there[1].name]:
                sock.refuse()
            elif not (self.passes(*there) and self.passes(*back)):
                self.clock.after(_SYN_AGAIN_S, arrive)
            elif (listener := machine.listeners.get(address[1])) is None:
                sock.refuse()
            else:
                other = SimSocket(self, machine)
                sock.peer, other.peer = other, sock
                sock.remote, other.local = address, address
                self.connections.append((sock, other))
                listener.backlog.append(other)
                sock.connecting = False
                if self.clock.now < self.flaky_until and self.rng.random() < 0.4:
                    self.clock.after(self.rng.uniform(0.0, 0.01), lambda: self.reset(sock, both=True))

        self.clock.after(self.latency(), arrive)


_END, _RESET = b"", b"reset"


class SimSocket:
    """One end of a stream, or a listener."""

    family = socket.AF_INET

    def __init__(self, network: Network, machine: Machine) -> None:
        self.network, self.machine = network, machine
        self.number = network.number()
        self.peer: SimSocket | None = None
        self.local, self.remote = (machine.address, self.number), ("", 0)
        self.backlog: deque[SimSocket] = deque()
        self.inbox = bytearray()
        self.eof = self.closed = self.connecting = self.listening = False
        self.error = 0
        self.doomed = False
        """Whether the connection is broken, but this end has not noticed it."""
        self._out: deque[bytes] = deque()
        self._out_bytes = 0
        self._stalled, self._stalled_at, self._last = 0, 0.0, 0.0
        self._ended = False
        self.keep_idle_s = 0
        self.gone = False
        """Whether its machine has lost power: nothing answers."""
        machine.sockets[self] = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.machine.name}:{self.local[1]} to {self.peer and self.peer.machine.name}:{self.remote[1]}>"

    # --- interface of a socket ------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        return -1 if self.closed else self.number

    def setblocking(self, _flag: bool) -> None:
        pass

    def setsockopt(self, _level: int, option: int, value: int) -> None:
        if option == socket.TCP_KEEPIDLE:
            self.keep_idle_s = value

    def getsockname(self) -> tuple[str, int]:
        return self.local

    def getpeername(self) -> tuple[str, int]:
        return self.remote

    def listen(self, _backlog: int = 0) -> None:
        self.listening = True
        self.machine.listeners[self.local[1]] = self

    def accept(self) -> tuple[SimSocket, tuple[str, int]]:
        self._check_open()
        if not self.backlog:
            raise BlockingIOError
        sock = self.backlog.popleft()
        return sock, sock.remote

    def connect(self, address: tuple[str, int]) -> None:
        self._check_open()
        self.connecting = True
        self.network.connect(self, address)

    def send(self, data: bytes | memoryview) -> int:
        self._check_open()
        if self.error or self._ended:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        assert self.peer is not None, "sent before the connection was made"
        room = _BUFFER_BYTES - self._out_bytes - len(self.peer.inbox)
        if room <= 0:
            raise BlockingIOError
        piece = bytes(data[:room])
        self._queue(piece)
        return len(piece)

    def sendmsg(self, buffers: Sequence[bytes | memoryview], rights: Sequence[Any] = ()) -> int:
        assert not rights, "agents cannot send descriptors to each other"
        return self.send(b"".join(buffers))

    def recv(self, nbytes: int) -> bytes:
        self._check_open()
        if self.inbox:
            data = bytes(self.inbox[:nbytes])
            del self.inbox[:nbytes]
            return data
        self.raise_error()
        if self.eof:
            return b""
        raise BlockingIOError

    def shutdown(self, _how: int) -> None:
        self._check_open()
        if self.peer is None or self.error:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        self._end()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.machine.sockets.pop(self, None)
        if self.listening:
            self.machine.listeners.pop(self.local[1], None)
            for sock in self.backlog:
                sock.close()
        elif self.peer is not None and not self.error and self.inbox:
            self._queue(_RESET)
        elif self.peer is not None and not self.error:
            self._end()

    # --- for the loop --------------------------------------------------------------------------------------------

    @property
    def readable(self) -> bool:
        return bool(self.backlog or self.inbox or self.eof or self.error)

    @property
    def writable(self) -> bool:
        if self.connecting:
            return False
        return bool(self.error) or self.peer is None or self._out_bytes + len(self.peer.inbox) < _BUFFER_BYTES

    def raise_error(self) -> None:
        if self.error:
            raise OSError(self.error, os.strerror(self.error))

    # --- for the network -----------------------------------------------------------------------------------------

    @property
    def done(self) -> bool:
        return (self.closed and not self._out) or bool(self.error) or self.gone

    def refuse(self) -> None:
        self.connecting, self.error = False, errno.ECONNREFUSED

    def fail(self, why: int) -> None:
        """Break this end. As on Linux, data that arrived before can still be read."""
        if not self.closed and not self.gone and not self.error:
            self.lose_tail()
            self.error = why

    def lose_tail(self) -> None:
        self._out.clear()
        self._out_bytes = 0
        self._stalled = 0

    def vanish(self) -> None:
        """Lose the power of this end's machine."""
        self.gone = True
        self.lose_tail()
        self.closed = True
        if self.listening:
            self.machine.listeners.pop(self.local[1], None)

    def retry(self) -> None:
        """Send stalled data again."""
        stalled, self._stalled = self._stalled, 0
        for _ in range(stalled):
            self._move_on(self.network.rng.uniform(0.0, 0.3))

    def _check_open(self) -> None:
        if self.closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._queue(_END)

    def _queue(self, piece: bytes) -> None:
        if self.doomed:  # the answer is a reset
            self.network.clock.after(self.network.latency(), lambda: self.fail(errno.ECONNRESET))
            return
        self._out.append(piece)
        self._out_bytes += len(piece)
        self._move_on(0.0)

    def _move_on(self, more_s: float) -> None:
        clock = self.network.clock
        self._last = max(self._last, clock.now + self.network.latency() + more_s)
        clock.at(self._last, self._deliver)

    def _deliver(self) -> None:
        peer, network = self.peer, self.network
        if not self._out or peer is None or self.gone:
            return
        if not network.passes(self.machine, peer.machine):
            if not self._stalled:
                since = self._stalled_at = network.clock.now
                network.clock.after(_UNANSWERED_S, lambda: self._unanswered(since))
            self._stalled += 1
            return
        piece = self._out.popleft()
        self._out_bytes -= len(piece)
        if piece is _RESET:
            peer.fail(errno.ECONNRESET)
        elif peer.closed or peer.error:
            if peer.closed and not peer.gone and peer._out and piece:
                peer._queue(_RESET)  # after the data that is on its way from there
            elif piece or peer.gone:
                self.lose_tail()
                network.clock.after(network.latency(), lambda: self.fail(errno.ECONNRESET))
        elif piece:
            peer.inbox += piece
        else:
            peer.eof = True

    def _unanswered(self, since: float) -> None:
        if self._stalled and self._stalled_at == since:
            self.fail(errno.ETIMEDOUT)


class Sockets:
    """A stand-in for the module `socket` in modules that make connections."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)

    def socket(self, *_: object) -> SimSocket:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        return SimSocket(self._network, loop.machine)
