"""The coordinator's side of the durable checkpoints of several nodes: when one is written, and from which one begins.

Every node writes its own ranks' part (`agent.share`), one step after the other, each when all have taken the one before. A
node that is lost on the way makes the attempt void; the next is made with the version that is committed then.
"""

import asyncio
import uuid
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from deadpool_run.agent.checkpoint.checkpointer import Checkpointers
from deadpool_run.agent.checkpoint.durable import EXIT_QUEUE_AGAIN, CheckpointJob
from deadpool_run.agent.checkpoint.durable_attempt import Attempt
from deadpool_run.agent.checkpoint.durable_schedule import Schedule
from deadpool_run.agent.checkpoint.initial_load import InitialLoad
from deadpool_run.agent.spec import DurableSpec
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.vault.checkpoint_format import CheckpointStep
from deadpool_run.vault.vault import Vault
from deadpool_run.wire import peers
from deadpool_run.wire.checkpoints import CheckpointLoaded

_AGAIN_S = 0.5
_MAX_VOID = 60
"""Attempts in a row that come to nothing because nodes are lost or versions gone, before that is called a failure."""
_WRITTEN_IN = frozenset({JobPhase.RUNNING, JobPhase.FINISHING, JobPhase.STOPPED})
_COMES_TO_RUN = frozenset({*_WRITTEN_IN, JobPhase.REPAIRING})


@dataclass(frozen=True, slots=True)
class CheckpointNodes:
    """The nodes of the job, and how they are told."""

    here: NodeId
    state: Callable[[], State]
    """The coordinator's, as it is now."""
    tell: Callable[[NodeId, peers.ToNode], None]
    """Speaks to one, our own included."""
    publish: Callable[[peers.Durable], None]
    """Lets all know the newest checkpoint."""


class DurableLeader:
    """Made in the running loop, for one coordinator; does nothing unless `spec` asks for something."""

    def __init__(  # noqa: PLR0913 - what it knows, tells and decides about
        self,
        spec: DurableSpec | None,
        *,
        run: str,
        checkpointers: Checkpointers,
        vault: Vault,
        nodes: CheckpointNodes,
        job: CheckpointJob,
        known: peers.Durable | None,
    ) -> None:
        """Begin, or go on from the newest checkpoint that is known."""
        self._spec = spec
        self._run = run
        self._checkpointers = checkpointers
        self._vault = vault
        self._nodes = nodes
        self._job = job
        self._loop = asyncio.get_running_loop()
        self._beginning: InitialLoad | None = None
        self._attempt: Attempt | None = None
        self._over: asyncio.Future[None] | None = None  # of the attempt
        self._voided = 0
        self._wanted = self._leaving = self._left = self._finishing = self._closed = False
        self._schedule = Schedule(spec, vault, self.look)
        self.newest = known
        """The newest checkpoint of the job."""
        if known is not None:
            self._schedule.written = Version(known.version)
            age = datetime.now(UTC) - datetime.fromisoformat(known.written)
            self._schedule.begin(max(0.0, age.total_seconds()))
        else:
            self._schedule.begin()

    def report(self) -> dict[str, Any] | None:
        """Return what a status shows; None where nothing is durable."""
        if self._spec is None:
            return None
        known = self.newest
        version, where, written = (known.version, known.where, known.written) if known else (None, None, None)
        return {"place": self._spec.target, "version": version, "where": where, "written": written}

    # --- a world begins --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Find out what the world is to begin from."""
        self._void("the world begins again")
        if self._beginning is not None:
            self._beginning.give_up()
        if self._spec is None:
            return
        self._beginning = InitialLoad(
            spec=self._spec,
            run=self._run,
            first=self._nodes.state().generation == 0,
            world_size=self._vault.world_size,
            checkpointers=self._checkpointers,
            tell=self._nodes.tell,
            say=self._job.say,
            begun=self._begun,
            lost=self._job.lost,
        )
        self._beginning.choose()

    def seat(self, node: NodeId, rank: Rank, call: Callable[[], None]) -> None:
        """Call as soon as every rank's slots, on the nodes where they will live, hold what the world begins from."""
        if self._beginning is None:
            call()
        else:
            self._beginning.seat(node, rank, call)

    def _begun(self, found: CheckpointLoaded) -> None:
        self._beginning = None
        self._schedule.written = Version(found.version)
        self._schedule.begin()
        if found.version >= 0:
            self._job.say(f"resuming at step {found.version}, from {found.where}")
            self._set_newest(peers.Durable(found.version, found.where, found.written))
        elif self._nodes.state().generation > 0:
            self._job.say("there is no durable checkpoint yet: the world begins at step 0")

    # --- while it runs ---------------------------------------------------------------------------------------------

    def preemption_notice(self) -> None:
        """Write now, since the end of the job was announced (SIGUSR1), and then, if so asked, end it."""
        if self._spec is None or not self._spec.target or self._leaving or self._left:
            return
        if self._nodes.state().phase in (JobPhase.STOPPING, JobPhase.STOPPED):
            return  # perhaps for that, by whoever led before; asked a second time, workers would be killed outright
        then = "then the job ends, to be queued again" if self._spec.exit_on_usr1 else "training goes on"
        self._job.say(f"SIGUSR1: writing a durable checkpoint; {then}")
        self._wanted, self._leaving = True, self._spec.exit_on_usr1
        self.look()

    def decided(self) -> None:
        """See whether what could not be written before the coordinator's last decision now can."""
        if self._wanted:
            self.look()

    def look(self) -> None:
        """Write a checkpoint if one is wanted or due, and can be written."""
        spec, state = self._spec, self._nodes.state()
        if spec is None or not spec.target or self._attempt or self._beginning or self._finishing or self._closed:
            return
        committed = (
            self._vault.status_page.committed()
        )  # None: not known (yet), such as after the coordinator has moved
        is_new = self._schedule.is_new(committed)
        if self._wanted and (state.phase not in _COMES_TO_RUN or (committed is not None and not is_new)):
            self._wanted = False  # there is nothing that is not durable
            self._end_job_if_leaving()
        elif ((self._wanted and is_new) or self._schedule.is_due(committed)) and self._is_whole(state):
            self._begin_attempt()

    def _is_whole(self, state: State) -> bool:
        """Tell whether every rank has a node that can be told to write."""
        homes_live = all(seat.node in state.nodes for seat in state.seats)
        return state.phase in _WRITTEN_IN and state.move is None and homes_live

    def _begin_attempt(self) -> asyncio.Future[None]:
        """Have it begin; return its end."""
        assert self._spec is not None
        ranks: dict[NodeId, list[Rank]] = defaultdict(list)
        for seat in self._nodes.state().seats:
            assert seat.node is not None
            ranks[seat.node].append(seat.rank)
        self._attempt = Attempt(
            uuid.uuid4().hex[:8],
            {node: tuple(own) for node, own in ranks.items()},
            self._nodes.here,
            self._spec.target,
            self._spec.keep,
        )
        over = self._over = self._loop.create_future()
        self._order()
        return over

    def _order(self) -> None:
        attempt = self._attempt
        assert attempt is not None
        for node, order in list(attempt.orders()):
            if self._attempt is attempt:
                self._nodes.tell(node, order)

    def saved(self, node: NodeId, told: peers.Saved) -> None:
        """Take in that a node has taken a step, or cannot."""
        attempt = self._attempt
        if attempt is None or told.attempt != attempt.name:
            return
        if told.failure and told.again:
            self._void(told.failure)
        elif told.failure:
            self._fail(f"node {node}: {told.failure}")
        elif attempt.taken(node, told):
            self._go_on(attempt)

    def _go_on(self, attempt: Attempt) -> None:
        if not attempt.next_step():
            self._written(attempt)
            return
        if attempt.step is CheckpointStep.COPY:
            committed = self._vault.status_page.committed()
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
        self._job.say(f"step {attempt.version} is durable: {attempt.where} ({attempt.nbytes / 1e6:.1f} MB)")
        self._end_job_if_leaving()

    def _fail(self, why: str) -> None:
        """Say that it cannot be written. Training goes on, also where the end of the job was foretold."""
        self._end_attempt()
        self._voided = 0
        self._wanted = self._leaving = False
        self._schedule.begin()
        self._job.say(f"no durable checkpoint could be written: {why}")

    def _void(self, why: str) -> None:
        """Give the attempt up; there will be another with a later version."""
        if self._attempt is None:
            return
        self._voided += 1
        if self._voided > _MAX_VOID:
            self._fail(why)
            return
        self._end_attempt()
        self._loop.call_later(_AGAIN_S, self.look)

    def _end_attempt(self) -> None:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        assert self._over is not None
        if attempt.where == "":
            for node in attempt.nodes:
                self._nodes.tell(node, peers.Void(attempt.name))
        self._over.set_result(None)

    def _set_newest(self, newest: peers.Durable) -> None:
        self.newest = newest
        self._nodes.publish(newest)

    def _end_job_if_leaving(self) -> None:
        if self._leaving and not self._left:
            self._left = True
            self._job.leave()

    # --- what happens meanwhile ------------------------------------------------------------------------------------

    def node_lost(self, node: NodeId) -> None:
        """Give up what the node had a part in."""
        if self._attempt is not None and node in self._attempt.nodes:
            self._job.say(f"the durable checkpoint that was being written is void: node {node} is lost")
            self._void(f"node {node} is lost")

    def new_timeline(self) -> None:
        """Go on with nothing that was not copied before: versions may be made again."""
        if self._attempt is not None and self._attempt.step in (CheckpointStep.PREPARE, CheckpointStep.COPY):
            self._void("ranks go back to a version")

    def loaded(self, node: NodeId, told: peers.Loaded) -> None:
        """Take in that a node has loaded what it was to."""
        if self._beginning is not None:
            self._beginning.loaded(node, told)

    # --- the end ---------------------------------------------------------------------------------------------------

    async def finish(self, exit_code: int, reason: str) -> tuple[int, str]:
        """Workers are gone: write their last common version, however they ended; return how the run ended."""
        if exit_code == EXIT_QUEUE_AGAIN or (self._left and exit_code != 0):  # the former of one who led before, too
            step = max(self._schedule.written, 0)
            return EXIT_QUEUE_AGAIN, f"its end was foretold; it goes on from step {step} when started again"
        if self._spec is None or not self._spec.target or self._beginning is not None:
            return exit_code, reason
        self._finishing = True
        if self._over is not None:
            await self._over
        if self._schedule.is_new(self._vault.status_page.committed()) and not self._closed:
            if self._is_whole(self._nodes.state()):
                await self._begin_attempt()
            else:
                self._job.say("the last step could not be made durable: a node that has a part of it is lost")
        return exit_code, reason

    def give_up(self) -> None:
        """Write no more, though the job ends: the user will not wait for it."""
        self.close()

    def close(self) -> None:
        """Have no part in anything any more."""
        self._closed = True
        self._schedule.stop()
        if self._beginning is not None:
            self._beginning.give_up()
        if self._attempt is not None:
            self._end_attempt()
