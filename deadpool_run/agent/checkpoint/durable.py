"""The agent's side of durable checkpoints: when one is written, what a world begins from, how a foretold end is met.

A checkpointer is forked for each, lent the node's status page and slots, and watched like any other process. Decides nothing
about workers: a world's ranks are given out once `when_ready` says so, and that is all that training sees of it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from deadpool_run.agent.checkpoint.checkpointer import Checkpointer, Checkpointers
from deadpool_run.agent.checkpoint.durable_schedule import Schedule
from deadpool_run.agent.spec import DurableSpec
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.checkpoint_format import NOTHING
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.checkpoints import (
    CheckpointFailed,
    CheckpointLoaded,
    CheckpointWritten,
    LoadCheckpoint,
    WriteCheckpoint,
)
from deadpool_run.wire.messages import Message

EXIT_QUEUE_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: the job is not done, and goes on from its checkpoint when it is started again."""


@dataclass(frozen=True, slots=True)
class CheckpointJob:
    """What is said of durable checkpoints, and to whom."""

    say: Callable[[str], None]
    """To the user."""
    lost: Callable[[str], None]
    """Why the job cannot begin from what it was told to begin from."""
    leave: Callable[[], None]
    """That it is to end, because its end was foretold and its state is safe."""


@dataclass(slots=True)
class _Run:
    """One checkpointer at work, until it has answered or is given up."""

    checkpointer: Checkpointer
    over: asyncio.Future[None]


class DurableCheckpoints:
    """Everything durable of one launch. Made in the running loop; does nothing unless `spec` asks for something."""

    def __init__(
        self, spec: DurableSpec | None, *, run: str, checkpointers: Checkpointers, vault: Vault, job: CheckpointJob
    ) -> None:
        """`run` names the run; what it has written itself is known by that."""
        self._spec = spec
        self._name = run
        self._checkpointers = checkpointers
        self._vault = vault
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._run: _Run | None = None  # the one that has not answered
        self._ready = True
        self._first = True
        self._waiting: list[Callable[[], None]] = []
        self._leaving = self._left = False
        self._schedule = Schedule(spec, vault, self._look)
        self._newest: tuple[int, str, str] | None = None  # checkpoint: its version, where it is, when it was written
        self.resume = NOTHING
        """The version that the first slots of the present world hold from before it."""

    @property
    def writes(self) -> bool:
        """Whether there is a place for checkpoints."""
        return self._spec is not None and self._spec.target != ""

    def report(self) -> dict[str, Any] | None:
        """Return what a status shows; None where nothing is durable."""
        if self._spec is None:
            return None
        version, where, written = self._newest or (None, None, None)
        return {"place": self._spec.target, "version": version, "where": where, "written": written}

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
        order = LoadCheckpoint(
            spec.target, self._name, spec.resume, self._first, len(self._vault.status_page.rank_entries)
        )
        self._first = False
        self._start(order, self._loaded)

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call now, or as soon as the slots hold what the world begins from."""
        if self._ready:
            call()
        else:
            self._waiting.append(call)

    def seated(self, rank: Rank) -> None:
        """Nothing is left to say: the status page has it since the slots were filled."""

    def _loaded(self, answer: Message) -> None:
        if not isinstance(answer, CheckpointLoaded):
            self._job.lost(answer.why if isinstance(answer, CheckpointFailed) else str(answer))
            return
        for refusal in answer.refused:
            self._job.say(refusal)
        self.resume = self._schedule.written = Version(answer.version)
        if answer.version >= 0:
            self._newest = (answer.version, answer.where, answer.written)
            for rank_entry in self._vault.status_page.rank_entries:
                rank_entry.set_slot(0, answer.version)
            self._job.say(f"resuming at step {answer.version}, from {answer.where}")
        self._ready = True
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()
        self._schedule.begin()
        if self._leaving:
            self._end_job()

    # --- while it runs ---------------------------------------------------------------------------------------------

    def preemption_notice(self) -> None:
        """Write now, since the end of the job was announced (SIGUSR1), and then, if so asked, end it."""
        assert self._spec is not None
        then = "then the job ends, to be queued again" if self._spec.exit_on_usr1 else "training goes on"
        self._job.say(f"SIGUSR1: writing a durable checkpoint; {then}")
        self._leaving = self._spec.exit_on_usr1
        self._write()

    def _end_job(self) -> None:
        self._left = True
        self._job.leave()

    def _look(self) -> None:
        if self._run is None and self._ready and self._schedule.is_due(self._vault.status_page.committed()):
            self._write()

    def _write(self) -> None:
        """Write the newest committed version, if it is new; one that is under way is all that can be done at a time."""
        if self._run is None and self._ready and self._spec is not None and self._spec.target:
            self._start(
                WriteCheckpoint(self._spec.target, self._name, max(self._schedule.written, 0), self._spec.keep),
                self._written_one,
            )

    def _written_one(self, answer: Message) -> None:
        if isinstance(answer, CheckpointWritten) and answer.version >= 0:
            self._schedule.written = Version(answer.version)
            self._newest = (answer.version, answer.where, datetime.now(UTC).isoformat(timespec="seconds"))
            self._job.say(f"step {answer.version} is durable: {answer.where} ({answer.nbytes / 1e6:.1f} MB)")
        elif isinstance(answer, CheckpointFailed):
            self._job.say(f"no durable checkpoint could be written: {answer.why}")
        self._schedule.begin()
        if self._leaving and isinstance(answer, CheckpointWritten):
            self._end_job()
        self._leaving = False

    # --- the end ---------------------------------------------------------------------------------------------------

    async def finish(self, exit_code: int, reason: str, signals: Sequence[int]) -> tuple[int, str]:
        """Workers are gone: write their last common version, however they ended; return how the run ended.

        One of these signals has it given up.
        """
        if self._left and exit_code != 0:
            return (
                EXIT_QUEUE_AGAIN,
                f"its end was foretold; it goes on from step {self._schedule.written} when started again",
            )
        if not self.writes or not self._ready:
            return exit_code, reason
        for number in signals:
            self._loop.add_signal_handler(number, self._abandon)
        if self._run is not None:
            await self._run.over
        if self._schedule.is_new(self._vault.status_page.committed()):
            self._write()
            if self._run is not None:
                await self._run.over
        return exit_code, reason

    def close(self) -> None:
        """Write no more; end a checkpointer that is at work."""
        self._ready = False
        self._waiting.clear()
        self._schedule.stop()
        self._abandon()

    # --- checkpointers ---------------------------------------------------------------------------------------------

    def _start(self, order: WriteCheckpoint | LoadCheckpoint, answered: Callable[[Message], None]) -> None:
        over: asyncio.Future[None] = self._loop.create_future()

        def heard(answer: Message) -> None:
            run.checkpointer.let_go()
            self._run = None
            over.set_result(None)
            answered(answer)

        ranks = [Rank(rank) for rank in range(self._vault.world_size)]
        run = self._run = _Run(self._checkpointers.start(ranks, heard), over)
        run.checkpointer.ask(order)

    def _abandon(self) -> None:
        """Give up what a checkpointer is doing."""
        run, self._run = self._run, None
        if run is not None:
            run.over.set_result(None)
            run.checkpointer.kill()
