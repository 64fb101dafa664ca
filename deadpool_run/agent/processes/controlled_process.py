"""A forked process and the agent's end of its control socket: worker, store or checkpointer."""

import signal
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from deadpool_run.agent.processes.children import Exit, Process
from deadpool_run.transport.message_stream import MessageStream
from deadpool_run.wire.messages import FORMAT, Message

MAX_UNSENT_BYTES = 8 << 20
"""A process with more unread messages is broken: orders are few, and the largest is one `Assign`."""

ControlChannel = MessageStream[Message]
"""The agent's end of a process's control socket."""


@dataclass(eq=False, slots=True)
class ControlledProcess:
    """A process for `ForkServer.fork`, which calls `make_fds`, then `unforked`, or `forked` and later `exited`.

    Either `on_failed` is called, or `on_started` and, once the process was reaped, `on_ended`.
    """

    kind: str
    on_started: Callable[[], None]
    on_message: Callable[[Message], None]
    on_failed: Callable[[str], None]
    on_ended: Callable[[Exit], None]
    more_fds: Callable[[], Iterable[int]] = tuple
    """Opens the process's descriptors, in addition to its socket."""
    process: Process | None = None
    channel: ControlChannel | None = None
    doomed: bool = False
    """It was killed, or will be as soon as it exists."""
    recalled: bool = False
    """Its order was cancelled."""
    _ours: socket.socket | None = None  # until there is a process

    def kill(self) -> None:
        """Kill the process with its group, as soon as it exists."""
        self.doomed = True
        if self.process is not None:
            self.process.signal_group(signal.SIGKILL)

    def make_fds(self) -> list[int]:
        """Return the descriptors for a new process, which the caller closes."""
        if self._ours is not None:
            self._ours.close()
        self._ours, theirs = socket.socketpair()
        return [theirs.detach(), *self.more_fds()]

    def forked(self, process: Process) -> None:
        """Begin to use the process."""
        assert self._ours is not None
        self.process = process
        self.channel = ControlChannel(self._ours, FORMAT, MAX_UNSENT_BYTES, self.on_message, self._channel_ended)
        self._ours = None
        if self.doomed:
            self.kill()
        self.on_started()

    def _channel_ended(self, why: Exception) -> None:
        """Kill a process that breaks the protocol or does not read. One that closed its socket may live on."""
        if not isinstance(why, ConnectionResetError):
            self.kill()

    def unforked(self, why: str) -> None:
        """Report that there will be no process."""
        if self._ours is not None:
            self._ours.close()
        self.on_failed(why)

    def exited(self, end: Exit) -> None:
        """Report the end of the process, after its last messages."""
        assert self.channel is not None
        self.channel.read_rest()  # what it sent last comes before its end
        self.channel.close()
        self.on_ended(end)
