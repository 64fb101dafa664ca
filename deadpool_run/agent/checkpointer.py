"""The processes that write durable checkpoints from a node's slots, and fill slots from them."""

import signal
import socket
from collections.abc import Callable, Iterator, Sequence

from deadpool_run.agent.channel import Channel
from deadpool_run.agent.nursery import Nursery
from deadpool_run.agent.processes import Exit, Process
from deadpool_run.ids import Rank
from deadpool_run.vault.board import EMPTY
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.checkpoints import (
    CheckpointFailed,
    LendBoard,
    LendSlots,
    TakeStep,
    ToCheckpointer,
    WriteCheckpoint,
)
from deadpool_run.wire.messages import Message

KIND = "checkpointer"

Heard = Callable[[Message], None]


class Checkpointers:
    """All of one node, each forked for one checkpoint and watched like any other process. In the running loop."""

    def __init__(self, nursery: Nursery, vault: Vault) -> None:
        self._nursery = nursery
        self._vault = vault
        self._processes: list[Process] = []  # those that have not been reaped

    def processes(self) -> Iterator[Process]:
        """Every checkpointer that has not been reaped."""
        return iter(self._processes)

    def start(self, ranks: Sequence[Rank], heard: Heard) -> "Checkpointer":
        """Return one that is lent the board and the slots of these ranks."""
        return Checkpointer(self._nursery, self._vault, ranks, heard, self._processes)


class Checkpointer:
    """One of them. It is asked for one thing after the other; `heard` is told each answer, or why there is none."""

    def __init__(
        self, nursery: Nursery, vault: Vault, ranks: Sequence[Rank], heard: Heard, processes: list[Process]
    ) -> None:
        self._nursery = nursery
        self._vault = vault
        self._ranks = ranks
        self._heard = heard
        self._processes = processes
        self._order: ToCheckpointer | None = None  # the question that has not been answered
        self._over = False  # nothing it says counts any more
        self._killed = False
        self._ours: socket.socket | None = None  # our end of the control socket until there is a process
        self._process: Process | None = None
        self._channel: Channel | None = None
        nursery.fork(KIND, self._make_fds, self._forked, self._unforked)

    def ask(self, order: ToCheckpointer) -> None:
        """Have it do something; it has done all else."""
        assert self._order is None
        self._order = order
        if self._channel is not None:
            self._channel.send(order)

    def let_go(self) -> None:
        """Ask nothing more: it ends."""
        self._over = True
        if self._channel is not None:
            self._channel.close()

    def kill(self) -> None:
        """End it, whatever it is doing, and hear no more of it."""
        self._over = self._killed = True
        if self._process is not None:
            self._process.signal_group(signal.SIGKILL)

    def _make_fds(self) -> list[int]:
        if self._ours is not None:
            self._ours.close()
        self._ours, theirs = socket.socketpair()
        return [theirs.detach()]

    def _unforked(self, why: str) -> None:
        if self._ours is not None:
            self._ours.close()
        self._answered(CheckpointFailed(why))

    def _forked(self, pid: int) -> None:
        assert self._ours is not None
        process = self._process = Process(pid, self._ended)
        self._processes.append(process)
        self._channel = Channel(
            self._ours,
            self._answered,
            lambda _: process.signal_group(signal.SIGKILL),  # confused: its end is its answer
        )
        self._ours = None
        if self._killed:  # given up before it existed
            process.signal_group(signal.SIGKILL)
            return
        self._channel.send(LendBoard(self._vault.world_size), [self._vault.board_fd])
        for rank in self._ranks:
            fds = self._vault.descriptors(rank)
            self._channel.send(LendSlots(rank), [fds["slot0"], fds["slot1"]])
        if self._order is not None:
            self._channel.send(self._order)
        if self._over:
            self._channel.close()

    def _answered(self, answer: Message) -> None:
        self._order = None
        if not self._over:
            self._heard(answer)

    def _ended(self, end: Exit) -> None:
        assert self._process is not None
        assert self._channel is not None
        self._processes.remove(self._process)
        self._nursery.forget(self._process.pid)
        self._vault.board.kept = EMPTY  # one that was killed has not let go
        self._channel.read_rest()
        self._channel.close()
        if self._over:
            return
        self._over = True
        does = "writes it" if isinstance(self._order, WriteCheckpoint | TakeStep) else "reads checkpoints"
        how = f"was killed by {signal.Signals(end.signal).name}" if end.signal else f"exited with code {end.code}"
        self._heard(CheckpointFailed(f"the process that {does} {how}"))
