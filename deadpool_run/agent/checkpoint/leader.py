"""The leader of durable checkpoints: decides when one is written, and from which one a world begins.

Every node copies and writes its own ranks' part (`participant`), in steps. A step begins when all nodes have finished the
last one. On one machine the only node is leader and participant. If a node fails, the attempt is void, and the next attempt
writes the version that is committed then.
"""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import asdict

from deadpool_run.agent.checkpoint.attempt import Attempt
from deadpool_run.agent.checkpoint.checkpointer import Checkpointers
from deadpool_run.agent.checkpoint.initial_load import InitialLoad
from deadpool_run.agent.checkpoint.job import CheckpointedJob
from deadpool_run.agent.checkpoint.schedule import Schedule
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.errors import ReplicasDifferError
from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.text import without_passwords
from deadpool_run.vault.checkpoint_format import CheckpointStep
from deadpool_run.vault.vault import Vault
from deadpool_run.wire import peers
from deadpool_run.wire.checkpoints import CheckpointFailed, CheckpointLoaded, ChooseCheckpoint, DurableSpec, StepTaken

EXIT_QUEUE_AGAIN = 75
"""EX_TEMPFAIL of sysexits.h: the job is not complete, and continues from its checkpoint when it is started again."""
_RETRY_S = 0.5
_LAST_ATTEMPTS = 3
"""Attempts to write the last step, if an attempt is void or the process that writes it dies."""
_MAX_VOID = 60
"""Writing has failed after more void attempts in a row. An attempt is void if a node failed or a version was overwritten."""
_WRITTEN_IN = frozenset({JobPhase.RUNNING, JobPhase.FINISHING, JobPhase.STOPPED})
_COMES_TO_RUN = frozenset({*_WRITTEN_IN, JobPhase.REPAIRING})


@dataclass(eq=False)
class CheckpointLeader:
    """Made in the running loop, one per coordinator. Does nothing without a `spec`."""

    spec: DurableSpec | None
    run: str
    checkpointers: Checkpointers
    vault: Vault
    job: CheckpointedJob
    newest: peers.Durable | None
    """The newest checkpoint of the job, as far as it is known."""

    def __post_init__(self) -> None:
        """Start, or continue from the newest checkpoint."""
        self._loop = asyncio.get_running_loop()
        self._initial_load: InitialLoad | None = None
        self._attempt: Attempt | None = None
        self._over: asyncio.Future[bool] | None = None  # of the attempt: whether another one may succeed
        self._voided = 0
        self._uncleaned: set[str] = set()  # what the user was told
        self._wanted = self._leaving = self._left = self._finishing = self._closed = False
        self._schedule = Schedule(self.spec, self.vault, self.check)
        if self.newest is not None:
            self._schedule.written = Version(self.newest.version)
            age = datetime.now(UTC) - datetime.fromisoformat(self.newest.written)
            self._schedule.begin(max(0.0, age.total_seconds()))
        else:
            self._schedule.begin()

    def report(self) -> dict[str, Any] | None:
        """Return what `status` shows; None where nothing is durable."""
        if self.spec is None:
            return None
        newest = dict.fromkeys(peers.Durable.__struct_fields__) if self.newest is None else asdict(self.newest)
        shown = {"place": self.spec.target, **newest}
        return {name: without_passwords(value) if isinstance(value, str) else value for name, value in shown.items()}

    # --- a world begins --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Choose the checkpoint that the world begins from. A restarted world prefers this run's own."""
        self._void("the world begins again")
        if self._initial_load is not None:
            self._initial_load.stop()
        spec, size, here = self.spec, self.vault.world_size, self.job.here
        if spec is None:
            return
        order = ChooseCheckpoint(spec.target, self.run, spec.resume, self.job.state.generation == 0, size, [])
        homes = {Rank(rank): here for rank in range(size)} if self.job.alone else {}
        self._initial_load = InitialLoad(order, self.job, self.checkpointers, homes, self._begun)
        self._initial_load.choose()

    def seat(self, node: NodeId, rank: Rank, call: Callable[[], None]) -> None:
        """Call as soon as the slots of every rank hold what the world begins from."""
        if self._initial_load is None:
            call()
        else:
            self._initial_load.seat(node, rank, call)

    def loaded(self, node: NodeId, answer: peers.Loaded) -> None:
        """Handle a node's answer: it has loaded its ranks' state, or cannot."""
        if self._initial_load is not None:
            self._initial_load.loaded(node, answer)

    def _begun(self, found: CheckpointLoaded) -> None:
        self._initial_load = None
        self._schedule.written = Version(found.version)
        self._schedule.begin()
        if found.version >= 0:
            self.job.print_line(f"resuming at step {found.version}, from {found.where}")
            self._set_newest(peers.Durable(found.version, found.where, found.written))
        elif self.job.state.generation > 0:
            self.job.print_line("there is no durable checkpoint yet: the world begins at step 0")

    # --- while it runs ---------------------------------------------------------------------------------------------

    def preemption_notice(self) -> None:
        """Write a checkpoint, since the end of the job was announced (SIGUSR1). Then end the job, if so configured."""
        if self.spec is None or not self.spec.target or self._leaving or self._left:
            return
        if self.job.state.phase in (JobPhase.STOPPING, JobPhase.STOPPED):
            return  # perhaps for this reason; a second request to stop would kill the workers
        then = "then the job ends, to be queued again" if self.spec.exit_on_usr1 else "training continues"
        self.job.print_line(f"SIGUSR1: writing a durable checkpoint; {then}")
        self._wanted, self._leaving = True, self.spec.exit_on_usr1
        self.check()

    def decided(self) -> None:
        """Check again, as the coordinator's last decision may allow a checkpoint that is wanted, or forbid any."""
        stop = self.job.state.stop
        if stop is not None and stop.exit_code == ReplicasDifferError.exit_code and not self._closed:
            self.close()
        elif self._wanted:
            self.check()

    def check(self) -> None:
        """Write a checkpoint if one is wanted or due, and can be written."""
        spec, state = self.spec, self.job.state
        if spec is None or not spec.target or self._attempt or self._initial_load or self._finishing or self._closed:
            return
        committed = self.vault.status_page.committed()
        is_new = self._schedule.is_new(committed)
        if self._wanted and not self._may_come(state, committed):
            self._wanted = False
            self._end_job_if_leaving()
        elif ((self._wanted and is_new) or self._schedule.is_due(committed)) and self._is_whole(state):
            self._begin_attempt()

    def _may_come(self, state: State, committed: Version | None) -> bool:
        """Return whether there is a version to write, or may be one soon: several nodes may learn late what is committed."""
        if self.job.alone:
            return self._schedule.is_new(committed)
        return state.phase in _COMES_TO_RUN and (committed is None or self._schedule.is_new(committed))

    def _is_whole(self, state: State) -> bool:
        """Return whether a living node has the slots of every rank, as on one machine."""
        if self.job.alone:
            return True
        homes_live = all(seat.node in state.nodes for seat in state.seats)
        return state.phase in _WRITTEN_IN and state.move is None and homes_live

    def _begin_attempt(self) -> asyncio.Future[bool]:
        """Start an attempt; return its end, and whether another one may succeed."""
        assert self.spec is not None
        here, seats = self.job.here, self.job.state.seats
        ranks: dict[NodeId, list[Rank]] = defaultdict(list)
        for seat in seats:
            ranks[here if self.job.alone or seat.node is None else seat.node].append(seat.rank)
        parts = {node: tuple(own) for node, own in ranks.items()}
        self._attempt = Attempt(uuid.uuid4().hex[:8], parts, here, self.run, self.spec.target, self.spec.keep)
        over = self._over = self._loop.create_future()
        self._order()
        return over

    def _order(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        for node, order in list(attempt.orders()):
            if self._attempt is attempt:
                self.job.tell_node(node, order)

    def saved(self, node: NodeId, answer: peers.Saved) -> None:
        """Handle a node's answer: it has finished a step, or cannot."""
        attempt = self._attempt
        if attempt is None or answer.attempt != attempt.name:
            return
        if isinstance(answer.answer, StepTaken):
            self._report_uncleaned(answer.answer)
        match answer.answer:
            case CheckpointFailed(why, again=True):
                self._void(why)
            case CheckpointFailed(why):
                self._fail(why if self.job.alone else f"node {node}: {why}", may_succeed=answer.answer.died)
            case StepTaken() as taken if attempt.taken(node, taken):
                self._advance(attempt)

    def _report_uncleaned(self, taken: StepTaken) -> None:
        """Report once what could not be removed. The next attempt tries again."""
        for line in taken.uncleaned:
            if line not in self._uncleaned:
                self._uncleaned.add(line)
                self.job.print_line(f"durable checkpoints: {line}")

    def _advance(self, attempt: Attempt) -> None:
        if not attempt.next_step():
            self._written(attempt)
            return
        if attempt.step is CheckpointStep.COPY:
            committed = self.vault.status_page.committed()
            if committed is None or not self._schedule.is_new(committed):
                self._void("nothing is committed any more")
                return
            attempt.version = committed
        self._order()

    def _written(self, attempt: Attempt) -> None:
        self._end_attempt()
        self._voided = 0
        self._wanted = False
        self._schedule.written = attempt.version
        self._schedule.begin()
        self._set_newest(peers.Durable(attempt.version, attempt.where, datetime.now(UTC).isoformat(timespec="seconds")))
        self.job.print_line(f"step {attempt.version} is durable: {attempt.where} ({attempt.nbytes / 1e6:.1f} MB)")
        self._end_job_if_leaving()

    def _fail(self, why: str, *, may_succeed: bool = False) -> None:
        """Report that no checkpoint can be written. Training continues, also after a preemption notice."""
        assert self._attempt is not None
        copied = self._attempt.version >= 0
        self._schedule.failed(self._attempt.version if copied else self.vault.status_page.committed())
        self._end_attempt(may_succeed=may_succeed)
        self._voided = 0
        self._wanted = self._leaving = False
        self.job.print_line(f"no durable checkpoint could be written: {why}")

    def _void(self, why: str) -> None:
        """End the attempt; another follows with a later version."""
        if self._attempt is None:
            return
        self._voided += 1
        if self._voided > _MAX_VOID:
            self._fail(why)
            return
        self._end_attempt(may_succeed=True)
        self._loop.call_later(_RETRY_S, self.check)

    def _end_attempt(self, *, may_succeed: bool = False) -> None:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        assert self._over is not None
        if attempt.where == "":
            for node in attempt.nodes:
                self.job.tell_node(node, peers.Void(attempt.name))
        self._over.set_result(may_succeed)

    def _set_newest(self, newest: peers.Durable) -> None:
        self.newest = newest
        self.job.tell_all(newest)

    def _end_job_if_leaving(self) -> None:
        if self._leaving and not self._left:
            self._left = True
            self.job.leave()

    # --- what happens meanwhile ------------------------------------------------------------------------------------

    def node_lost(self, node: NodeId) -> None:
        """Void the attempt that the node took part in."""
        if self._attempt is not None and node in self._attempt.nodes:
            self.job.print_line(f"the durable checkpoint that was being written is void: node {node} is lost")
            self._void(f"node {node} is lost")

    def led_again(self) -> None:
        """Void the attempt, as its leader leads in a later term now: nodes have given up what it ordered before."""
        if self._attempt is not None:
            self.job.print_line(
                "the durable checkpoint that was being written is void: the nodes had no leader meanwhile"
            )
            self._void("the nodes had no leader meanwhile")

    def new_timeline(self) -> None:
        """Void an attempt whose version is not copied yet: versions may be made again."""
        if self._attempt is not None and self._attempt.step in (CheckpointStep.PREPARE, CheckpointStep.COPY):
            self._void("ranks go back to a version")

    # --- the end ---------------------------------------------------------------------------------------------------

    async def finish(self, exit_code: int, reason: str) -> tuple[int, str]:
        """Write the last common version of the ended workers, and return how the run ended. `close` cuts it short.

        If replicas differ after a repair, nothing is written: the cause is not known, and may be older than the difference.
        """
        if exit_code == ReplicasDifferError.exit_code:
            self.close()
            return exit_code, reason
        if exit_code == EXIT_QUEUE_AGAIN or (self._left and exit_code != 0):  # the last leader may have chosen the code
            step = max(self._schedule.written, 0)
            return EXIT_QUEUE_AGAIN, f"preempted: the job continues from step {step} when it is started again"
        if self.spec is None or not self.spec.target or self._initial_load is not None:
            return exit_code, reason
        self._finishing = True
        if self._over is not None:
            await self._over
        for _ in range(_LAST_ATTEMPTS):
            if self._closed or not self._schedule.is_new(self.vault.status_page.committed()):
                break
            if not self._is_whole(self.job.state):
                self.job.print_line("the last step could not be made durable: a node that has a part of it is lost")
                break
            if not await self._begin_attempt():
                break
        else:
            self.job.print_line(f"the last step could not be made durable in {_LAST_ATTEMPTS} attempts")
        return exit_code, reason

    def close(self) -> None:
        """Write and load nothing more, not even the last step."""
        self._closed = True
        self._schedule.stop()
        if self._initial_load is not None:
            self._initial_load.stop()
        if self._attempt is not None:
            self._end_attempt()
