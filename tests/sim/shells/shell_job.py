"""One job of real agents on simulated machines. Only processes and the kernel are simulated.

Each agent runs in its own virtual loop. Invariants are asserted at each decision and order, and at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from copies import Copies, LinkedGathering, Storages
from kit.invariants import check_invariants
from network import Machine, Network
from pretended import SimForkServer, SimNode, SimStore, SimWorker
from virtual_loop import Scheduler, VirtualLoop, World
from workers import Worker

from deadpool_run.agent import agent as agent_module
from deadpool_run.agent.cluster.leader import Leader
from deadpool_run.agent.cluster.participation import Participation
from deadpool_run.agent.spec import LOGS_OFF, Cluster, LaunchSpec, Mode, Target
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.effects import Effect
from deadpool_run.core.leadership import quorum
from deadpool_run.core.leadership.electorate import AgentEnded
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.errors import MachineError
from deadpool_run.ids import NodeId
from deadpool_run.transport import handshake
from deadpool_run.wire import peers
from deadpool_run.wire.auth import ConnectionRole, GreetingRefusedError

T = 5.0
"""The node timeout, in seconds."""
PORT = 29500
_TOKEN = b"of the simulation"
_TAIL = 120


class SimServer(CoordinatorServer):
    """A server that checks each decision."""

    def _decide(self, event: ev.Event) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.agent.job.check_decision(loop.agent, event)
        super()._decide(event)
        check_invariants(self._settings, self.state)
        loop.agent.job.check_epoch(loop.agent, self.state)


class SimLeader(Leader):
    """A leader whose orders are logged and checked."""

    def perform(self, effect: Effect) -> None:
        loop: Any = asyncio.get_running_loop()
        loop.agent.job.check_order(self.state, effect)
        super().perform(effect)

    def welcome(self, node: NodeId) -> tuple[peers.ToNode, ...]:
        loop: Any = asyncio.get_running_loop()
        assert loop.agent.holds_lease(), f"{loop.name} admits {node} without a lease"
        return super().welcome(node)


class SimParticipation(Participation):
    """A participation that checks the end of the job, as its node learns it."""

    def _over(self, exit_code: int, reason: str) -> None:
        loop: Any = asyncio.get_running_loop()
        if not self.over.done():
            loop.agent.job.check_end(loop.agent, exit_code)
        super()._over(exit_code, reason)


class SimAgent:
    """One agent process."""

    def __init__(self, job: Job, machine: Machine, life: int) -> None:
        self.job, self.machine = job, machine
        self.name = machine.name if life == 0 else f"{machine.name}+{life}"
        self.loop = VirtualLoop(self.name, machine, job.clock, job.rng)
        self.loop.agent = self  # type: ignore[attr-defined]
        self.loop.set_exception_handler(lambda _, context: job.failures.append((self.name, context)))
        self.exit_code: int | None = None
        folder = job.folder / self.name
        folder.mkdir()
        endpoints = tuple((each.address, PORT) for each in job.network.machines.values())
        cluster = Cluster(endpoints=endpoints, token=_TOKEN, node_name=machine.name)
        spec = LaunchSpec(
            settings=job.settings,
            target=Target(Mode.PATH, ("train.py",)),
            nproc_per_node=job.settings.ranks_per_node,
            run_id="simulated",
            run_dir=folder / "run",
            log_dir=LOGS_OFF,
            hang_timeout_s=0.0,
            cluster=cluster,
        )
        self.agent = self.loop.inside(agent_module._Agent, spec, None, None)
        self.forkserver = SimForkServer(self)
        self.agent._over = self.loop.create_future()
        self.agent._forkserver = self.forkserver
        self.task = self.loop.create_task(self._run(cluster))

    async def _run(self, cluster: Cluster) -> None:
        try:
            self.exit_code = await self.agent._among_others(cluster)
        except MachineError as error:
            self.exit_code = error.exit_code
        self.job.note(f"{self.name} exits with {self.exit_code}")

    @property
    def lives(self) -> bool:
        """Whether the process exists."""
        return not self.loop.ended and not self.task.done()

    @property
    def member(self) -> Participation | None:
        return None if self.loop.ended else self.agent._member

    @property
    def node(self) -> NodeId | None:
        return None if self.member is None else self.member.node.here.node

    @property
    def election(self) -> Any:
        """The state of its election; None without an election."""
        leadership = None if self.member is None else getattr(self.member, "leadership", None)
        return None if leadership is None or leadership._closed else leadership.agent

    def holds_lease(self) -> bool:
        return self.election is not None and quorum.holds_lease(self.election, self.loop.time())


class Job:
    """The machines and their faults. Use it in a block of `simulated`."""

    refused: list[int]

    def __init__(self, seed: int, machines: int, settings: Settings, folder: Path) -> None:
        self.rng = random.Random(seed)
        self.clock = World()
        self.settings, self.folder = settings, folder
        self.steps = 1 << 30
        self.moves: set[int] = set()  # no story drains a rank or node yet
        self.network = Network(self.clock, self.rng)
        self.scheduler = Scheduler(self.clock, self.rng)
        for number in range(machines):
            self.network.add(f"n{number}", self.rng.uniform(0.0, 1000.0))
        self.copies: dict[str, Copies] = {}
        self.storage, self.gathering = Storages(self), LinkedGathering(self)
        self.tokens = itertools.count(1)
        self.agents: list[SimAgent] = []
        self.nodes: list[SimNode] = []
        self.stores: dict[tuple[str, int], SimStore] = {}
        self.workers: dict[int, SimWorker] = {}
        self.ranks: dict[int, int] = {}
        self.homes: dict[int, str] = {}
        """The node of each rank's owner."""
        self._taken_up: dict[int, int] = {}
        self.breaks: set[str] = set()
        self.refused = []
        self.founded = False
        self.failures: list[Any] = []
        self.terms: dict[int, str] = {}
        self.epochs: dict[int, str] = {}
        self.deciders: list[tuple[int, str]] = []
        self.leader: tuple[SimAgent, State] | None = None
        """The agent that decided last, and its state."""
        self.stopped: do.StopJob | None = None
        self.known_end: tuple[str, int] | None = None
        """The first agent that knew of the job's end, and the exit code."""
        self.log: list[str] = []

    # --- machines and agents -------------------------------------------------------------------------------------

    def note(self, line: str) -> None:
        self.log.append(f"{self.clock.now:9.4f} {line}")

    def start(self, name: str) -> None:
        """Start an agent on a machine that has none."""
        machine = self.network.machines[name]
        machine.power = True
        life = sum(agent.machine is machine for agent in self.agents)
        agent = SimAgent(self, machine, life)
        self.note(f"{agent.name} starts")
        self.agents.append(agent)
        self.scheduler.loops.append(agent.loop)

    def agent_on(self, name: str) -> SimAgent | None:
        """Return the machine's living agent."""
        return next((each for each in self.agents if each.machine.name == name and each.lives), None)

    def living(self) -> list[SimAgent]:
        return [agent for agent in self.agents if agent.lives]

    def kill(self, name: str, *, power: bool = False) -> None:
        """Kill the machine's agent, which ends its workers, or cut the machine's power."""
        machine, agent = self.network.machines[name], self.agent_on(name)
        if agent is not None:
            agent.loop.ended = True
        for sock in list(machine.sockets):
            sock.vanish() if power else sock.close()
        if power:
            machine.sockets.clear()
            machine.power = False
        for worker in self.on_machine(machine):
            worker.suspend()
            worker.vanish() if power else self.clock.after(self.rng.uniform(0.0, 0.05), worker.vanish)
        if agent is not None and not power and self.rng.random() < 0.7:
            self.clock.after(self.rng.uniform(0.06, 0.3), lambda: self._witness(agent))

    def _witness(self, agent: SimAgent) -> None:
        """Let the fork server, which outlives the agent, tell the voters."""
        if agent.forkserver.witness is None or not agent.machine.power:
            return
        credentials, addresses = agent.forkserver.witness
        loop = VirtualLoop(f"{agent.name}'s witness", agent.machine, self.clock, self.rng)
        loop.set_exception_handler(lambda _, context: self.failures.append((loop.name, context)))
        self.scheduler.loops.append(loop)

        async def tell() -> None:
            for address, port in addresses:
                try:
                    connection = await handshake.connect(address, port, ConnectionRole.VOTE, credentials, 1.0)
                except (OSError, GreetingRefusedError):
                    continue
                frame = peers.encode(AgentEnded(credentials.node))
                await loop.sock_sendall(connection.sock, frame + connection.sending.tag(frame))
                connection.close()

        loop.create_task(tell())

    def pause(self, name: str, *, hears: bool = False) -> None:
        self.network.machines[name].pauses += 1
        self.network.machines[name].hears = hears

    def wake(self, name: str) -> None:
        self.network.machines[name].pauses -= 1
        for worker in self.on_machine(self.network.machines[name]):
            worker.woken()
        self.network.retry()

    # --- for nodes and workers -----------------------------------------------------------------------------------

    def add_node(self, node: SimNode) -> None:
        self.nodes.append(node)
        name = node.here.node
        assert name not in self.copies, f"a second node is called {name}"

    def replicator(self, node: SimNode) -> Copies:
        made = self.copies[node.here.node] = Copies(node, node.replicated)
        return made

    def take_up(self, rank: int, node: str, epoch: int) -> None:
        """Record the node of a rank, unless the node was given up and obeys late."""
        if epoch >= self._taken_up.get(rank, 0):
            self._taken_up[rank], self.homes[rank] = epoch, node

    def node_of(self, name: str) -> SimNode:
        return next(node for node in self.nodes if node.here.node == name)

    def reaches(self, one: str, other: str) -> bool:
        """Tell whether two nodes' machines reach each other."""
        mine, theirs = self.node_of(one).machine, self.node_of(other).machine
        return mine.runs and theirs.runs and self.network.linked(mine.name, theirs.name)

    def on(self, node: str) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if worker.node == node]

    def on_machine(self, machine: Machine) -> list[SimWorker]:
        return [worker for worker in self.workers.values() if worker.machine is machine and worker.alive]

    def tell(self, event: Any) -> None:
        node = self.node_of(self.workers[event.worker].node)
        if not node.loop.ended and not node.loop.is_closed():
            node.loop.call_soon(node.heard, event)

    def serves_store(self, worker: Worker) -> bool:
        store = self.stores[worker.store]
        mine = worker.machine.name
        return store.serves() and self.network.linked(mine, store._loop.machine.name)

    def is_network_bad(self) -> bool:
        return False

    @property
    def state(self) -> State:
        assert self.leader is not None
        return self.leader[1]

    # --- invariants ------------------------------------------------------------------------------------------------

    def check_decision(self, agent: SimAgent, event: ev.Event) -> None:
        """Assert that a term has one leader, that only one leader decides, and that it holds a lease."""
        election = agent.election
        if election is None or agent.member is None or agent.member.leader is None:
            return  # it starts
        term, state = election.term, agent.member.leader.state
        self.note(f"  {agent.name} t{term} decides {event}")
        assert self.terms.setdefault(term, agent.name) == agent.name, (
            f"{agent.name} and {self.terms[term]} lead term {term}"
        )
        assert term >= max(self.terms), f"{agent.name} decides in term {term} after term {max(self.terms)}"
        self.leader = agent, state
        if state.phase is JobPhase.STOPPED:
            return
        assert self.known_end is None, f"{agent.name} decides {event}, but the job has ended: {self.known_end}"
        assert agent.holds_lease(), f"{agent.name} decides {event} without a lease"
        for other in self.living():
            if other is not agent and other.loop.runs:
                assert not other.holds_lease(), f"{other.name} and {agent.name} hold a lease"

    def check_end(self, agent: SimAgent, exit_code: int) -> None:
        """Assert that all agents learn the same exit code."""
        self.known_end = self.known_end or (agent.name, exit_code)
        assert self.known_end[1] == exit_code, f"{agent.name} learned exit code {exit_code}, not {self.known_end}"

    def check_epoch(self, agent: SimAgent, state: State) -> None:
        owner = self.epochs.setdefault(state.epoch, agent.name)
        assert owner == agent.name or state.epoch == 0, f"epoch {state.epoch} of {agent.name} was {owner}'s"

    def check_order(self, state: State, order: Effect) -> None:
        self.note(f"      -> {order}")
        match order:
            case do.StopJob():
                self.stopped = order
            case do.AssignRank():
                for other in self.workers.values():
                    if other.number != order.worker and self.ranks.get(other.number) == order.rank and other.alive:
                        assert other.node not in state.nodes, f"rank {order.rank} was taken from living {other.number}"
                        assert other.suspended, (
                            f"rank {order.rank} is given away while {other.number} on {other.node} runs"
                        )
            case do.AttachGroups():
                owners = [self.workers[member.worker] for member in state.owners()]
                stands = {(each.epoch, each.mode, each.completed, each.token) for each in owners if each.alive}
                assert len(stands) <= 1, f"attaching to epoch {order.epoch}, but the ranks differ: {stands}"
            case do.KillWorker() if order.reason.startswith("no progress while"):
                self.check_not_stuck(order)

    def check_not_stuck(self, order: do.KillWorker) -> None:
        """Assert that no wait in a repair runs into its timeout. Stories with bad networks override this."""
        raise AssertionError(f"the wait for worker {order.worker} timed out: {order.reason}")

    def check_owners(self, worker: SimWorker) -> None:
        """Assert that no other worker runs the rank that this one takes."""
        if worker.suspended or not worker.alive:
            return
        for other in self.workers.values():
            if other is not worker and other.alive and self.ranks.get(other.number) == self.ranks[worker.number]:
                assert other.suspended, (
                    f"{worker.number} takes rank {self.ranks[worker.number]}, which {other.number} runs"
                )

    # --- running -------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        assert self.scheduler.run_one(), "no event is left"
        if self.failures:
            name, context = self.failures[0]
            error = context.get("exception")
            raise AssertionError(f"a callback of {name} raised: {context['message']}: {error!r}") from error
        for agent in self.agents:
            if not agent.loop.ended and agent.task.done() and not agent.task.cancelled() and agent.task.exception():
                error = agent.task.exception()
                raise AssertionError(f"{agent.name} failed: {error!r}") from error

    def until(self, met: Callable[[], bool], within_s: float, what: str) -> None:
        """Run until `met` is true."""
        deadline = self.clock.now + within_s
        while not met():
            assert self.clock.now < deadline, f"not within {within_s:g} s: {what}"
            self.advance()

    def sleep(self, long_s: float) -> None:
        """Run for a while."""
        over = []
        self.clock.after(long_s, lambda: over.append(True))
        while not over:
            self.advance()

    def told(self, error: BaseException) -> str:
        tail = "\n".join(self.log[-_TAIL:])
        return f"{error} at {self.clock.now:.3f}\n{tail}"

    def bury(self) -> None:
        """Free the resources of all processes."""
        for loop in self.scheduler.loops:
            for sock in list(loop.machine.sockets):
                sock.close()
        self.failures.clear()
        for loop in self.scheduler.loops:
            if not loop.is_closed():
                loop.set_exception_handler(lambda *_: None)
                loop.bury()
        leaders = [agent.agent._member.leader for agent in self.agents if agent.agent._member is not None]
        for leader in leaders:
            if leader is not None:
                leader._observers.close(wait=False)  # it reads the node's status page
        for node in self.nodes:
            node.close()
        for leader in leaders:
            if leader is not None:
                leader._journal.close()
        for thread in threading.enumerate():
            if thread.name in {
                "deadpool-journal",
                "deadpool-record",
                "deadpool-samples",
                "deadpool-leader-file",
            }:  # they end by themselves
                thread.join()
