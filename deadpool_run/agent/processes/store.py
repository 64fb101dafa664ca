"""The job's store: a process that the agent replaces for each generation, always at the same address."""

import os
import socket
from collections.abc import Callable

from deadpool_run.agent.processes.children import Exit, Process
from deadpool_run.agent.processes.controlled_process import ControlledProcess
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.refusals import Refusals
from deadpool_run.errors import ProtocolError
from deadpool_run.wire.messages import Message
from deadpool_run.wire.stores import CallersIdentified, IdentifyCallers, StoreListening, StoreRefused

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
    reason if no process can serve, `on_callers` with callers from other machines, which `identified` answers.
    """

    def __init__(
        self,
        forkserver: ForkServer,
        on_lost: Callable[[str], None],
        host: str,
        on_callers: Callable[[IdentifyCallers], None],
    ) -> None:
        self.host = host
        self.refusals = Refusals("to the store")
        self._forkserver = forkserver
        self._on_lost = on_lost
        self._on_callers = on_callers
        self._listener = socket.create_server((host, 0), family=family_of(host), backlog=_BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        """On `host`, the same for the life of this object."""
        self._stale = False
        self._closed = False
        self._deaths = 0
        self._waiting: list[Callable[[], None]] = []
        self._fork()

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

    def identified(self, callers: CallersIdentified) -> None:
        """Have these callers served or refused. The process ignores those that it does not know."""
        if self._child.channel is not None:
            self._child.channel.send(callers)

    def close(self) -> None:
        """Let the process end."""
        self._closed = True
        self.refusals.close()
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
        match message:
            case StoreListening():
                self._deaths = 0
            case IdentifyCallers():
                self._on_callers(message)
            case StoreRefused(count, source, reason):
                self.refusals.add(source, reason, count)
            case _:
                raise ProtocolError(f"the store sent an unexpected {type(message).__name__}")

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
