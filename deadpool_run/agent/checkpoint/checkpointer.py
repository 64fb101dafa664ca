"""The processes that write durable checkpoints from a node's slots, and fill slots from them.

Storage may cease to answer, and whoever uses it then waits for ever: so everything that is asked for has its time.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence

from deadpool_run.agent.processes.children import Exit, Process
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.worker_channel import WorkerChannel
from deadpool_run.ids import Rank
from deadpool_run.vault.status_page import EMPTY
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.checkpoints import (
    CheckpointFailed,
    LendBoard,
    LendSlots,
    TakeStep,
    ToCheckpointer,
)
from deadpool_run.wire.messages import Message

KIND = "checkpointer"
_DEATH_S = 5.0
"""So long a killed one may take to be gone before it is taken to sleep uninterruptibly in the kernel, with its memory."""

Heard = Callable[[Message], None]


class Checkpointers:
    """All of one node, each forked for one checkpoint and watched like any other process. In the running loop."""

    def __init__(self, forkserver: ForkServer, vault: Vault, timeout_s: float) -> None:
        """Whatever is asked for is given up after `timeout_s`."""
        self.forkserver = forkserver
        self.vault = vault
        self.timeout_s = timeout_s
        self.stuck: list[Process] = []
        """Those that were killed long ago and have not ended: as long as there is one, no other is made."""

    def start(self, ranks: Sequence[Rank], heard: Heard) -> "Checkpointer":
        """Return one that is lent the status page and the slots of these ranks."""
        return Checkpointer(self, ranks, heard)


class Checkpointer:
    """One of them. It is asked for one thing after the other; `heard` is told each answer, or why there is none."""

    def __init__(self, owner: Checkpointers, ranks: Sequence[Rank], heard: Heard) -> None:
        self._owner = owner
        self._vault = owner.vault
        self._ranks = ranks
        self._heard = heard
        self._loop = asyncio.get_running_loop()
        self._order: ToCheckpointer | None = None  # the question that has not been answered
        self._timer: asyncio.TimerHandle | None = None  # of that question
        self._over = False  # nothing it says counts any more
        self._killed = self._late = False
        self._ours: socket.socket | None = None  # our end of the control socket until there is a process
        self._process: Process | None = None
        self._channel: WorkerChannel | None = None
        self._hindered = bool(owner.stuck)
        if not self._hindered:
            owner.forkserver.fork(KIND, self._make_fds, self._forked, self._unforked, self._ended)

    def ask(self, order: ToCheckpointer) -> None:
        """Have it do something; it has done all else."""
        assert self._order is None
        self._order = order
        if self._hindered:
            pids = ", ".join(str(process.pid) for process in self._owner.stuck)
            why = f"the process of an earlier attempt (pid {pids}) does not end: its storage does not answer"
            self._loop.call_soon(self._answered, CheckpointFailed(why))
            return
        if self._channel is not None:
            self._send(order)

    def _send(self, order: ToCheckpointer) -> None:
        assert self._channel is not None
        self._timer = self._loop.call_later(self._owner.timeout_s, self._overdue)
        self._channel.send(order)

    def let_go(self) -> None:
        """Ask nothing more: it ends."""
        self._finish()
        if self._channel is not None:
            self._channel.close()

    def kill(self) -> None:
        """End it, whatever it is doing, and hear no more of it."""
        self._finish()
        self._kill()

    def _kill(self) -> None:
        self._killed = True
        if self._process is not None:
            self._process.signal_group(signal.SIGKILL)

    def _finish(self) -> None:
        self._over = True
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        """End it, since the answer does not come: its end is the answer."""
        self._late = True
        self._timer = self._loop.call_later(_DEATH_S, self._deathless)
        self._kill()

    def _deathless(self) -> None:
        """Wait no more for its end, and make no other before it: each would sleep as this one, and hold its memory."""
        assert self._process is not None
        self._vault.status_page.kept = EMPTY
        self._owner.stuck.append(self._process)
        self._fail("does not end though it is killed")

    def _make_fds(self) -> list[int]:
        if self._ours is not None:
            self._ours.close()
        self._ours, theirs = socket.socketpair()
        return [theirs.detach()]

    def _unforked(self, why: str) -> None:
        if self._ours is not None:
            self._ours.close()
        self._answered(CheckpointFailed(why))

    def _forked(self, process: Process) -> None:
        assert self._ours is not None
        self._process = process
        self._channel = WorkerChannel(
            self._ours,
            self._answered,
            lambda _: process.signal_group(signal.SIGKILL),  # confused: its end is its answer
        )
        self._ours = None
        if self._killed:  # given up before it existed
            process.signal_group(signal.SIGKILL)
            return
        self._channel.send(LendBoard(self._vault.world_size), [self._vault.status_page_fd])
        for rank in self._ranks:
            fds = self._vault.descriptors(rank)
            self._channel.send(LendSlots(rank), [fds["slot0"], fds["slot1"]])
        if self._order is not None and not self._over:
            self._send(self._order)
        if self._over:
            self._channel.close()

    def _answered(self, answer: Message) -> None:
        self._order = None
        self._stop_timer()
        if not self._over:
            self._heard(answer)

    def _ended(self, end: Exit) -> None:
        assert self._channel is not None
        self._owner.stuck = [process for process in self._owner.stuck if process is not self._process]
        self._vault.status_page.kept = EMPTY  # one that was killed has not let go
        self._channel.read_rest()
        self._channel.close()
        if not self._over:
            how = f"was killed by {signal.Signals(end.signal).name}" if end.signal else f"exited with code {end.code}"
            self._fail(how)

    def _fail(self, how: str) -> None:
        """Say that it ended without an answer, or that it is given up."""
        self._finish()
        does = "writes it" if isinstance(self._order, TakeStep) else "reads checkpoints"
        if self._late:
            how = f"was not done within {self._owner.timeout_s:g} s (--durable-timeout): does its storage answer?"
        self._heard(CheckpointFailed(f"the process that {does} {how}"))
