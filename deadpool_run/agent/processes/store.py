"""The agent's side of the store process: the job's TCPStore, fresh for each generation, always at the same address."""

import os
import signal
import socket
from collections.abc import Callable

from deadpool_run.agent.processes.children import Exit, Process
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.worker_channel import WorkerChannel
from deadpool_run.wire.messages import Message, StoreListening

LOOPBACK = "127.0.0.1"
_BACKLOG = 1024
_MAX_DEATHS = 3
"""Store processes in a row that may die before they serve."""


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an IP literal."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Store:
    """Owns the listening socket; the process that serves on it is replaced by `renew` and whenever it dies.

    Clients may connect at any time: until a process serves, they wait in the socket's backlog.

    `on_lost` is called with the reason when no store can be had.
    """

    def __init__(self, forkserver: ForkServer, on_lost: Callable[[str], None], host: str = LOOPBACK) -> None:
        self.host = host
        self._forkserver = forkserver
        self._on_lost = on_lost
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
        self._stale = False
        self._closed = False
        self._deaths = 0
        self._process: Process | None = None
        self._channel: WorkerChannel | None = None
        self._socket: socket.socket | None = None
        self._waiting: list[Callable[[], None]] = []
        self._order = self._fork()

    @property
    def port(self) -> int:
        """Where it listens, on `host`; the same for the life of this object."""
        return int(self._listener.getsockname()[1])

    @property
    def process(self) -> Process | None:
        """The process that serves, once there is one."""
        return self._process

    def when_fresh(self, call: Callable[[], None]) -> None:
        """Call now, or as soon as nobody serves the keys of before `renew`."""
        if self._stale:
            self._waiting.append(call)
        else:
            call()

    def renew(self) -> None:
        """Forget every key: end the process; its end starts another."""
        self._waiting.clear()
        if self._process is not None and self._process.alive:
            self._stale = True
            self._process.signal_group(signal.SIGKILL)

    def close(self) -> None:
        """Let the process end."""
        self._closed = True
        self._waiting.clear()
        self._forkserver.recall(self._order)
        self._listener.close()
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.signal_group(signal.SIGKILL)

    def _fork(self) -> int:
        return self._forkserver.fork("store", self._open, self._forked, self._on_lost, self._on_exit)

    def _open(self) -> list[int]:
        if self._socket is not None:
            self._socket.close()
        self._socket, theirs = socket.socketpair()
        return [theirs.detach(), os.dup(self._listener.fileno())]

    def _forked(self, process: Process) -> None:
        assert self._socket is not None
        self._process = process
        self._channel = WorkerChannel(self._socket, self._on_message, self._on_lost)
        self._socket = None
        if self._closed:
            process.signal_group(signal.SIGKILL)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, StoreListening):
            self._deaths = 0

    def _on_exit(self, exit_: Exit) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._closed:
            return
        self._deaths += not self._stale
        self._stale = False
        if self._deaths >= _MAX_DEATHS:
            self._on_lost(f"the store ended {self._deaths} times before it served ({exit_})")
            return
        self._order = self._fork()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
