"""The agent's side of durable checkpoints: when one is written, what a world begins from, how a foretold end is met.

A checkpointer is forked for each, lent the node's board and slots, and watched like any other process. Decides nothing
about workers: a world's ranks are given out once `when_ready` says so, and that is all that training sees of it.
"""

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from deadpool_run.agent.channel import Channel
from deadpool_run.agent.nursery import Nursery
from deadpool_run.agent.processes import Exit, Process
from deadpool_run.agent.spec import DurableSpec
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.board import EMPTY
from deadpool_run.vault.durable import NOTHING
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.messages import (
    CheckpointFailed,
    CheckpointLoaded,
    CheckpointWritten,
    LendBoard,
    LendSlots,
    LoadCheckpoint,
    Message,
    WriteCheckpoint,
)

KIND = "checkpointer"
EXIT_QUEUE_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: the job is not done, and goes on from its checkpoint when it is started again."""

_LOOK_MIN_S = 0.02
_LOOK_MAX_S = 2.0
_NS_PER_S = 1e9
_FOLLOWING_RANK = 0  # whose steps tell when to look again: synchronous ranks are within one step of each other


@dataclass(slots=True)
class _Run:
    """One checkpointer. `answered` is called once, with its answer or why there is none, unless it is given up."""

    order: WriteCheckpoint | LoadCheckpoint
    answered: Callable[[Message], None]
    over: asyncio.Future[None]
    ours: socket.socket | None = None  # our end of the control socket until there is a process
    process: Process | None = None
    channel: Channel | None = None


class Durable:
    """Everything durable of one launch. Made in the running loop; does nothing unless `spec` asks for something.

    `lost` is called with the reason when the job cannot begin from what it was told to begin from; `leave` when it is
    to end because its end was foretold and its state is safe.
    """

    def __init__(  # noqa: PLR0913 - what it reads, starts and tells
        self,
        spec: DurableSpec | None,
        *,
        run: str,
        nursery: Nursery,
        vault: Vault,
        say: Callable[[str], None],
        lost: Callable[[str], None],
        leave: Callable[[], None],
    ) -> None:
        """`run` names the run; what it has written itself is known by that."""
        self._spec = spec
        self._name = run
        self._nursery = nursery
        self._vault = vault
        self._say = say
        self._lost = lost
        self._leave = leave
        self._loop = asyncio.get_running_loop()
        self._run: _Run | None = None  # the one that has not answered
        self._processes: list[Process] = []  # those that have not been reaped
        self._ready = True
        self._first = True
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._due_at = 0.0
        self._leaving = self._left = False
        self._written = NOTHING  # the newest version known to be on the disk; set-up alone is not worth one
        self.resume = NOTHING
        """The version that the first slots of the present world hold from before it."""

    @property
    def writes(self) -> bool:
        """Whether there is a place for checkpoints."""
        return self._spec is not None and self._spec.target != ""

    def processes(self) -> Iterator[Process]:
        """Every checkpointer that has not been reaped."""
        return iter(self._processes)

    # --- a world begins --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Bring into the vault, which is fresh, what the world is to begin from."""
        self.resume = NOTHING
        spec = self._spec
        if spec is None:
            return
        self._abandon()
        self._waiting.clear()
        self._ready = False
        order = LoadCheckpoint(spec.target, self._name, spec.resume, self._first, len(self._vault.board.cells))
        self._first = False
        self._start(order, self._loaded)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call now, or as soon as the slots hold what the world begins from."""
        if self._ready:
            call()
        else:
            self._waiting.append(call)

    def _loaded(self, answer: Message) -> None:
        if not isinstance(answer, CheckpointLoaded):
            self._lost(answer.why if isinstance(answer, CheckpointFailed) else str(answer))
            return
        for refusal in answer.refused:
            self._say(refusal)
        self.resume = self._written = Version(answer.version)
        if answer.version >= 0:
            for cell in self._vault.board.cells:
                cell.set_slot(0, answer.version)
            self._say(f"resuming at step {answer.version}, from {answer.where}")
        self._ready = True
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
        self._wait_anew()
        if self._leaving:
            self._end_job()

    # --- while it runs ---------------------------------------------------------------------------------------------

    def foretold(self) -> None:
        """Write now, since the end of the job was announced (SIGUSR1), and then, if so asked, end it."""
        assert self._spec is not None
        then = "then the job ends, to be queued again" if self._spec.exit_on_usr1 else "training goes on"
        self._say(f"SIGUSR1: writing a durable checkpoint; {then}")
        self._leaving = self._spec.exit_on_usr1
        self._write()

    def _end_job(self) -> None:
        self._left = True
        self._leave()

    def _wait_anew(self) -> None:
        """Look at the board when the next checkpoint may be due."""
        if self._timer is not None:
            self._timer.cancel()
        spec = self._spec
        if spec is None or not spec.target:
            return
        self._due_at = self._loop.time() + (spec.every_s or 0.0)
        self._timer = self._loop.call_later(self._pause(), self._look)

    def _look(self) -> None:
        assert self._spec is not None
        self._timer = self._loop.call_later(self._pause(), self._look)
        committed = self._vault.board.committed()
        if self._run is None and self._ready and committed is not None and self._is_due(committed):
            self._write()

    def _is_due(self, committed: Version) -> bool:
        assert self._spec is not None
        if committed <= max(self._written, 0):
            return False
        if self._spec.every_steps is not None:
            return committed >= max(self._written, 0) + self._spec.every_steps
        return self._loop.time() >= self._due_at

    def _pause(self) -> float:
        """Return how long no checkpoint will be due: half the way to it, as the last step's time foretells."""
        assert self._spec is not None
        left_s = self._due_at - self._loop.time()
        if self._spec.every_steps is not None:
            cell = self._vault.board.cells[_FOLLOWING_RANK]
            steps = max(self._written, 0) + self._spec.every_steps - cell.completed
            left_s = steps * cell.step_ns / _NS_PER_S / 2
        return min(max(left_s, _LOOK_MIN_S), _LOOK_MAX_S)

    def _write(self) -> None:
        """Write the newest committed version, if it is new; one that is under way is all that can be done at a time."""
        if self._run is None and self._ready and self._spec is not None and self._spec.target:
            self._start(
                WriteCheckpoint(self._spec.target, self._name, max(self._written, 0), self._spec.keep),
                self._written_one,
            )

    def _written_one(self, answer: Message) -> None:
        if isinstance(answer, CheckpointWritten) and answer.version >= 0:
            self._written = Version(answer.version)
            self._say(f"step {answer.version} is durable: {answer.where} ({answer.nbytes / 1e6:.1f} MB)")
        elif isinstance(answer, CheckpointFailed):
            self._say(f"no durable checkpoint could be written: {answer.why}")
        self._wait_anew()
        if self._leaving and isinstance(answer, CheckpointWritten):
            self._end_job()
        self._leaving = False

    # --- the end ---------------------------------------------------------------------------------------------------

    async def finish(self, exit_code: int, reason: str, signals: Sequence[int]) -> tuple[int, str]:
        """Workers are gone: write their last common version, however they ended; return how the run ended.

        One of these signals has it given up.
        """
        if self._left and exit_code != 0:
            return EXIT_QUEUE_AGAIN, f"its end was foretold; it goes on from step {self._written} when started again"
        if not self.writes or not self._ready:
            return exit_code, reason
        for number in signals:
            self._loop.add_signal_handler(number, self._abandon)
        if self._run is not None:
            await self._run.over
        committed = self._vault.board.committed()
        if committed is not None and committed > max(self._written, 0):
            self._write()
            if self._run is not None:
                await self._run.over
        return exit_code, reason

    def close(self) -> None:
        """Write no more; end a checkpointer that is at work."""
        self._ready = False
        self._waiting.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._abandon()

    # --- checkpointers ---------------------------------------------------------------------------------------------

    def _start(self, order: WriteCheckpoint | LoadCheckpoint, answered: Callable[[Message], None]) -> None:
        run = self._run = _Run(order, answered, self._loop.create_future())

        def make_fds() -> list[int]:
            if run.ours is not None:
                run.ours.close()
            run.ours, theirs = socket.socketpair()
            return [theirs.detach()]

        self._nursery.fork(KIND, make_fds, lambda pid: self._forked(run, pid), lambda why: self._unforked(run, why))

    def _unforked(self, run: _Run, why: str) -> None:
        if run.ours is not None:
            run.ours.close()
        self._answered(run, CheckpointFailed(why))

    def _forked(self, run: _Run, pid: int) -> None:
        assert run.ours is not None
        process = run.process = Process(pid, lambda end: self._ended(run, end))
        self._processes.append(process)
        run.channel = Channel(
            run.ours,
            lambda answer: self._answered(run, answer),
            lambda _: process.signal_group(signal.SIGKILL),  # confused: its end is its answer
        )
        run.ours = None
        if run.over.done():  # given up before it existed
            process.signal_group(signal.SIGKILL)
            return
        ranks = [self._vault.descriptors(Rank(rank)) for rank in range(len(self._vault.board.cells))]
        run.channel.send(LendBoard(len(ranks)), [ranks[0]["board"]])
        for rank, fds in enumerate(ranks):
            run.channel.send(LendSlots(rank), [fds["slot0"], fds["slot1"]])
        run.channel.send(run.order)

    def _answered(self, run: _Run, answer: Message) -> None:
        """Let the checkpointer go, and take its answer, unless it was given up or has answered."""
        if run.over.done():
            return
        self._run = None
        run.over.set_result(None)
        if run.channel is not None:
            run.channel.close()
        run.answered(answer)

    def _ended(self, run: _Run, end: Exit) -> None:
        assert run.process is not None
        assert run.channel is not None
        self._processes.remove(run.process)
        self._nursery.forget(run.process.pid)
        self._vault.board.kept = EMPTY  # one that was killed has not let go
        run.channel.read_rest()
        run.channel.close()
        does = "reads checkpoints" if isinstance(run.order, LoadCheckpoint) else "writes it"
        how = f"was killed by {signal.Signals(end.signal).name}" if end.signal else f"exited with code {end.code}"
        self._answered(run, CheckpointFailed(f"the process that {does} {how}"))

    def _abandon(self) -> None:
        """Give up what a checkpointer is doing."""
        run, self._run = self._run, None
        if run is not None:
            run.over.set_result(None)
            if run.process is not None:
                run.process.signal_group(signal.SIGKILL)
