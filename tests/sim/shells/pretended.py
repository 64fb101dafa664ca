"""Stand-ins for the processes of simulated agents: workers, stores, a fork server, a control socket.

The workers and their collectives are those of the other simulations (`workers`), with the same assertions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from workers import Mode, Worker

from deadpool_run.agent.node.node import LocalNode
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.effects import Effect
from deadpool_run.ids import Rank, WorkerId
from deadpool_run.wire import peers
from deadpool_run.wire.auth import Credentials

if TYPE_CHECKING:
    from shell_job import Job, SimAgent
    from virtual_loop import VirtualLoop

_STEP_S = 0.6


class SimWorker(Worker):
    """A worker on a machine that can pause."""

    machine: Any
    _stopped = False

    @property
    def suspended(self) -> bool:
        return self._stopped or self.machine.paused

    @suspended.setter
    def suspended(self, value: bool) -> None:
        self._stopped = value

    def resume(self) -> None:
        self._stopped = False
        self.woken()

    def woken(self) -> None:
        """Run the waiting actions, if the worker is no longer stopped."""
        if not self.suspended:
            waiting, self.waiting = self.waiting, []
            for what in waiting:
                what()

    def _next_step(self) -> None:
        if self.completed >= self.sim.steps:
            self._finish()
        else:
            self.mode = Mode.STEPPING
            self.then(_STEP_S, lambda: self.sim.gathering.arrive(self))


class Workers:
    """A node's workers, with the interface of `Workforce`."""

    def __init__(self, node: SimNode) -> None:
        self._node, self._job = node, node.job
        self._suspended = False

    def _mine(self) -> list[SimWorker]:
        return [worker for worker in self._job.on(self._node.here.node) if worker.alive]

    def ranks(self) -> list[Rank]:
        return [Rank(self._job.ranks[each.number]) for each in self._mine() if each.number in self._job.ranks]

    def rank(self, worker: WorkerId) -> Rank | None:
        found = self._job.workers[worker]
        return Rank(self._job.ranks[worker]) if found.alive and worker in self._job.ranks else None

    def pid(self, worker: WorkerId) -> int | None:
        return 1000 + worker if self._job.workers[worker].alive else None

    def start(self, worker: WorkerId) -> None:
        assert worker not in self._job.workers, f"worker {worker} was started before"
        made = self._job.workers[worker] = SimWorker(self._job, worker, self._node.here.node)
        made.machine = self._node.machine
        made._stopped = self._suspended
        made.start()

    def suspend(self) -> None:
        self._suspended = True
        for worker in self._mine():
            worker.suspend()

    def resume(self) -> None:
        self._suspended = False
        for worker in self._mine():
            worker.resume()

    def close(self) -> None:
        """Kill all workers. They end a moment later."""
        for worker in self._mine():
            worker.suspend()
            self._job.clock.after(self._job.rng.uniform(0.0, 0.05), worker.vanish)


class SimNode(LocalNode):
    """A real node with simulated workers: orders and reports pass through the code of `LocalNode`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.loop: VirtualLoop = asyncio.get_running_loop()  # type: ignore[assignment]
        self.agent: SimAgent = self.loop.agent
        self.job: Job = self.agent.job
        self.machine = self.loop.machine
        self.closed = False
        self.workforce = Workers(self)
        self.job.add_node(self)

    def perform(self, effect: Effect, capture_interval: int, source: peers.Peer | None) -> None:
        if isinstance(effect, do.BeginGeneration | do.ReportReplicas | do.DiscardAbove):
            super().perform(effect, capture_interval, source)
            return
        self._inventory.ordered(effect, capture_interval)
        job, name = self.job, self.here.node
        job.note(f"      {name} obeys {effect}")
        if isinstance(effect, do.StartWorker):
            self.workforce.start(effect.worker)
            return
        worker = job.workers.get(effect.worker)
        assert worker is not None, f"{name} got {effect}, but has no such worker"
        assert worker.node == name, f"{name} got {effect}, but that worker is on {worker.node}"
        match effect:
            case do.KillWorker() | do.TerminateWorker() | do.AbandonWorker():
                job.clock.after(job.rng.uniform(0.0, 0.1), lambda: worker.die(signal=9))
                return
            case do.AssignRank(number, rank):
                job.ranks[number] = rank
                job.take_up(rank, name, effect.epoch)
                self.vault.vacate(rank)
                self.copies.assign(rank, known_there=effect.transcript_from is None and effect.replacement)
                job.check_owners(worker)
        if isinstance(effect, do.AssignRank | do.ReEnter):
            worker.store = (self._world.store_host, self._world.store_port)
        worker.down.send(lambda: worker.obey(effect))

    def heard(self, event: ev.Event) -> None:
        """Handle a worker's report."""
        if not self.closed:
            self._submit(event)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            super().close()


class SimStore:
    """A stand-in for the job's store."""

    def __init__(self, _forkserver: object, _on_lost: object, host: str, _on_callers: object) -> None:
        self._loop: VirtualLoop = asyncio.get_running_loop()  # type: ignore[assignment]
        job = self._loop.agent.job
        self.host, self.port = host, job.network.number()
        job.stores[self.host, self.port] = self
        self._renewed_at = -1.0
        self.closed = False

    def serves(self) -> bool:
        return not self.closed and self._loop.runs

    def when_fresh(self, call: Callable[[], None]) -> None:
        if self._loop.time() < self._renewed_at + 0.1:
            self._loop.call_at(self._renewed_at + 0.1, call)
        else:
            call()

    def renew(self) -> None:
        self._renewed_at = self._loop.time()

    def close(self) -> None:
        self.closed = True


class SimForkServer:
    """A stand-in for the fork server. It only testifies the agent's end."""

    environment: Mapping[str, str] = {}

    def __init__(self, agent: SimAgent) -> None:
        self._agent = agent
        self.witness: tuple[Credentials, Sequence[tuple[str, int]]] | None = None

    def testify(self, credentials: Credentials, agents: Sequence[tuple[str, int]]) -> None:
        self.witness = credentials, agents

    def fork(self, _child: object) -> None: ...

    def recall(self, _child: object) -> None: ...

    def close(self) -> None: ...

    def children(self) -> list[Worker]:
        return self._agent.job.on_machine(self._agent.machine)

    def processes(self) -> list[Worker]:
        return self.children()

    def end_strangers(self) -> None: ...

    def kill_strangers(self, _timeout_s: float) -> None: ...

    async def settled(self, _timeout_s: float) -> None: ...


class SimControl:
    """A stand-in for the control socket."""

    def __init__(self, *_: object) -> None: ...

    async def start(self) -> None: ...

    def notify(self) -> None: ...

    async def close(self) -> None: ...
