"""Checkpointers: processes that write durable checkpoints from a node's slots, and fill slots from them.

Each order has a timeout, since a process waits for ever if its storage stops answering.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deadpool_run.agent.processes.children import Exit, Process
from deadpool_run.agent.processes.controlled_process import ControlChannel, ControlledProcess
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.core.recovery.shutdown import describe_exit
from deadpool_run.ids import Rank
from deadpool_run.vault.status_page import EMPTY
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.checkpoints import CheckpointFailed, LendSlots, LendStatusPage, TakeStep, ToCheckpointer
from deadpool_run.wire.messages import Message

_DEATH_S = 5.0
"""How long a killed process may take to end. After that it hangs in the kernel."""

OnAnswer = Callable[[Message], None]


@dataclass(eq=False, slots=True)
class Checkpointers:
    """The checkpointers of one node, each forked for one checkpoint. In the running loop."""

    forkserver: ForkServer
    vault: Vault
    timeout_s: float
    stuck: list[Process] = field(default_factory=list)
    """Killed processes that have not ended. While there is one, no other is forked."""

    def start(self, ranks: Sequence[Rank], on_answer: OnAnswer) -> "Checkpointer":
        """Fork a checkpointer, and lend it the status page and the slots of these ranks."""
        return Checkpointer(self, ranks, on_answer)


class Checkpointer:
    """One checkpointer. It takes one order at a time; `on_answer` takes the answer, or the reason why there is none."""

    def __init__(self, owner: Checkpointers, ranks: Sequence[Rank], on_answer: OnAnswer) -> None:
        self._owner = owner
        self._vault = owner.vault
        self._ranks = ranks
        self._on_answer = on_answer
        self._loop = asyncio.get_running_loop()
        self._order: ToCheckpointer | None = None  # not answered yet
        self._timer: asyncio.TimerHandle | None = None  # that order's timeout
        self._over = False  # its answers no longer count
        self._why = ""  # why it was killed
        self._child = ControlledProcess(
            "checkpointer",
            on_started=self._started,
            on_message=self._answered,
            on_failed=lambda why: self._answered(CheckpointFailed(why)),
            on_ended=self._ended,
        )
        self._hindered = bool(owner.stuck)
        if not self._hindered:
            owner.forkserver.fork(self._child)

    def ask(self, order: ToCheckpointer) -> None:
        """Send it an order. It must have answered the last one."""
        assert self._order is None
        self._order = order
        if self._hindered:
            pids = ", ".join(str(process.pid) for process in self._owner.stuck)
            why = f"the process of an earlier attempt (pid {pids}) does not end: its storage does not answer"
            self._loop.call_soon(self._answered, CheckpointFailed(why))
            return
        if self._child.channel is not None:
            self._send(self._child.channel, order)

    def _send(self, channel: ControlChannel, order: ToCheckpointer) -> None:
        self._timer = self._loop.call_later(self._owner.timeout_s, self._overdue)
        channel.send(order)

    def let_go(self) -> None:
        """Let it end: there are no further orders."""
        self._finish()
        if self._child.channel is not None:
            self._child.channel.close()

    def kill(self) -> None:
        """Kill it, and ignore its answer."""
        self._finish()
        self._child.kill()

    def _finish(self) -> None:
        self._over = True
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _overdue(self) -> None:
        """Kill it, since the answer does not come: its end is the answer."""
        self._why = f"was not done within {self._owner.timeout_s:g} s (--durable-timeout): does its storage answer?"
        self._timer = self._loop.call_later(_DEATH_S, self._deathless)
        self._child.kill()

    def _deathless(self) -> None:
        """Stop waiting for its end, and fork no other before that: each would hang too, and hold memory."""
        assert self._child.process is not None
        self._vault.status_page.kept = EMPTY
        self._owner.stuck.append(self._child.process)
        self._fail(self._why)

    def _started(self) -> None:
        channel = self._child.channel
        assert channel is not None
        if self._over:  # it was let go or killed before it existed
            channel.close()
            return
        channel.send(LendStatusPage(self._vault.world_size), [self._vault.status_page_fd])
        for rank in self._ranks:
            fds = self._vault.descriptors(rank)
            channel.send(LendSlots(rank), [fds["slot0"], fds["slot1"]])
        if self._order is not None:
            self._send(channel, self._order)

    def _answered(self, answer: Message) -> None:
        self._order = None
        self._stop_timer()
        if not self._over:
            self._on_answer(answer)

    def _ended(self, end: Exit) -> None:
        self._owner.stuck = [process for process in self._owner.stuck if process is not self._child.process]
        self._vault.status_page.kept = EMPTY  # a killed one has not cleared it
        if not self._over:
            self._fail(self._why or describe_exit(end.code, end.signal), died=not self._why)

    def _fail(self, how: str, *, died: bool = False) -> None:
        """Report that it ended without an answer, or too late."""
        self._finish()
        does = "writes it" if isinstance(self._order, TakeStep) else "reads checkpoints"
        self._on_answer(CheckpointFailed(f"the process that {does} {how}", died=died))
