"""The job's TCPStore: a process that the agent replaces for each generation, always at the same address."""

import os
import socket
from collections.abc import Callable

from deadpool_run.agent.processes.children import Exit, Process
from deadpool_run.agent.processes.controlled_process import ControlledProcess
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.wire.messages import Message, StoreListening

LOOPBACK = "127.0.0.1"
_BACKLOG = 1024
_MAX_DEATHS = 3
"""Store processes in a row that may die before they serve."""


def family_of(address: str) -> socket.AddressFamily:
    """Return the family of an IP literal."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Store:
    """Owns the listening socket. `renew` replaces the process that serves on it; one that dies is replaced too.

    Clients may connect at any time: until a process serves, they wait in the socket's backlog. `on_lost` is called with the
    reason if no process can serve.
    """

    def __init__(self, forkserver: ForkServer, on_lost: Callable[[str], None], host: str = LOOPBACK) -> None:
        self.host = host
        self._forkserver = forkserver
        self._on_lost = on_lost
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
        self._stale = False
        self._closed = False
        self._deaths = 0
        self._waiting: list[Callable[[], None]] = []
        self._fork()

    @property
    def port(self) -> int:
        """The port on `host`, the same for the life of this object."""
        return int(self._listener.getsockname()[1])

    @property
    def process(self) -> Process | None:
        """The serving process, once there is one."""
        return self._child.process

    def when_fresh(self, call: Callable[[], None]) -> None:
        """Call as soon as no process serves the keys from before `renew`, perhaps now."""
        if self._stale:
            self._waiting.append(call)
        else:
            call()

    def renew(self) -> None:
        """Forget every key: end the process; its end starts another."""
        self._waiting.clear()
        if self.process is not None and self.process.alive:
            self._stale = True
            self._child.kill()

    def close(self) -> None:
        """Let the process end."""
        self._closed = True
        self._waiting.clear()
        self._forkserver.recall(self._child)
        self._listener.close()
        self._child.kill()

    def _fork(self) -> None:
        self._child = ControlledProcess(
            "store",
            on_started=lambda: None,
            on_message=self._on_message,
            on_failed=self._on_lost,
            on_ended=self._on_exit,
            more_fds=lambda: [os.dup(self._listener.fileno())],
        )
        self._forkserver.fork(self._child)

    def _on_message(self, message: Message) -> None:
        if isinstance(message, StoreListening):
            self._deaths = 0

    def _on_exit(self, exit_: Exit) -> None:
        if self._closed:
            return
        self._deaths += not self._stale
        self._stale = False
        if self._deaths >= _MAX_DEATHS:
            self._on_lost(f"the store ended {self._deaths} times before it served ({exit_})")
            return
        self._fork()
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
