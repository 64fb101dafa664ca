"""Several agents, each of which can become leader: the real core and election on a simulated network with cuts.

Safety is asserted at each takeover, by agents and workers at each order, and after every decision. Liveness is asserted
with bounds of time.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable

from agents import Agent, T
from machine import Clock
from outages import KINDS, Fault, planned
from simulations import settings_on_nodes
from wires import CutGathering, CutStorage, Net
from workers import Mode, Worker

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.leadership import election, quorum
from deadpool_run.core.leadership import electorate as el
from deadpool_run.core.settings import Settings
from deadpool_run.core.transitions import JobPhase

BOUND_S = 40.0
HORIZON_S = 600.0
BARE_S = 16.0


class Cluster:
    """One job on several nodes, with faults as data."""

    def __init__(
        self,
        seed: int,
        settings: Settings,
        faults: Iterable[Fault],
        *,
        steps: int,
        log_delay_s: float,
        bare: bool = False,
    ) -> None:
        self.rng = random.Random(seed)
        self.bare = bare
        """Whether to simulate only the election, without decisions, in a hundredth of the time."""
        self.settings, self.steps, self.log_delay_s = settings, steps, log_delay_s
        self.clock = Clock()
        self.net = Net(self.clock, self.rng)
        self.storage = CutStorage(self.clock, self.rng, settings.world_size, self.net)
        self.gathering = CutGathering(self)
        self.tokens = itertools.count(1)
        self.workers: dict[int, Worker] = {}
        self.ranks: dict[int, int] = {}
        self.breaks: set[str] = set()
        self.agents: dict[str, Agent] = {}
        self.skews: dict[str, float] = {}
        self.gaps: dict[tuple[str, int], dict[int, tuple[float, ev.Event]]] = {}
        self.terms: dict[int, str] = {}
        self.epochs: dict[int, str] = {}
        self.moves: set[int] = set()
        """Epochs that began because ranks move, without a loss."""
        self.left: list[str] = []
        """Drained nodes that have left."""
        self.faults = list(faults)
        self.done_to: list[str] = []
        self.troubled_at = self.disturbed_at = 0.0
        self.stopped: do.StopJob | None = None
        self.ended_why = ""
        self.uncovered = False
        self.log: list[str] = []
        names = [f"n{at}" for at in range(settings.nodes + settings.spare_nodes)]
        first = names[0]
        self.storage.join(first)
        self.agents[first] = Agent(self, first, election.first_leader(first, T, self.skews.setdefault(first, 500.0)))
        for name in names[1:]:
            self.clock.after(self.rng.uniform(0.0, 1.0), lambda name=name: self.join(name))
        for fault in self.faults:
            self.clock.at(fault.at, lambda fault=fault: fault.befall(self))
        self.agents[first].begin()

    # --- for workers ---------------------------------------------------------------------------------------------

    @property
    def state(self):
        return self.leader.state

    @property
    def leader(self) -> Agent:
        return self.agents[self.terms[max(self.terms)]]

    def tell(self, event: ev.Event) -> None:
        self.agents[self.workers[event.worker].node].said(event)

    def serves_store(self, worker: Worker) -> bool:
        leader = self.agents[worker.store]
        return leader.alive and leader.deciding and self.net.linked(worker.node, worker.store)

    # --- the world -----------------------------------------------------------------------------------------------

    def note(self, line: str) -> None:
        self.log.append(f"{self.clock.now:9.4f} {line}")

    def place(self, name: str) -> ev.Place:
        return ev.Place(name=name)

    def on(self, name: str) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.node == name]

    def join(self, name: str) -> None:
        """Start an agent. It joins when it can reach the leader."""
        leader = self.leader
        if self.stopped is not None or self.clock.now > 60.0:
            return
        if not leader.decides() or not self.net.linked(name, leader.name):
            self.clock.after(0.5, lambda: self.join(name))
            return
        self.storage.join(name)
        leader.members.add(name)
        leader.think(el.AgentsJoined({name: ""}))
        if leader.fenced:
            return
        agent = self.agents[name] = Agent(self, name, election.follower(name, T, leader.mind.configurations, 0.0))
        agent.mind = election.follower(name, T, leader.mind.configurations, agent.now)
        agent.resynced = leader.mind.term
        agent.arm()
        leader.heartbeat()
        leader.decide(ev.NodeJoined(name, self.place(name)))
        self.troubled_at = self.clock.now

    def closed(self, name: str) -> None:
        """Tell all reachable agents that this one has closed its connections, at its end or fence."""
        agent = self.agents[name]
        agent.loud = True
        self.storage.lose(name)
        for other in self.agents.values():
            if other.alive and not other.fenced and other.name != name:
                arrive = lambda other=other: self.hear_closed(other, name)  # noqa: E731
                self.net.send(name, other.name, arrive)

    def hear_closed(self, other: Agent, name: str) -> None:
        """Let `other` dial the closed agent's host, which refuses. The workers have ended before the last try."""

        def refuse() -> None:
            if self.net.linked(other.name, name):
                other.think(el.AgentRefused(name))

        self.clock.after(0.1 * T, refuse)

    def end_agent(self, name: str, *, loud: bool) -> None:
        """End an agent. `loud`: its process is killed, and its fork server ends its workers; otherwise its host is lost."""
        agent = self.agents[name]
        agent.alive = False
        self.check_covered()
        for worker in self.on(name):
            worker.vanish() if not loud else self.clock.after(self.rng.uniform(0.0, 0.05), worker.vanish)
        self.storage.lose(name)
        if loud:
            self.closed(name)
        if loud and self.rng.random() < 0.5:  # its fork server outlives it and tells the voters
            self.clock.after(0.1, lambda: self.witness_end(name))

    def release(self, name: str) -> None:
        """End the agent of a drained node, which may leave."""

        def leave() -> None:
            if self.agents[name].alive and self.stopped is None:
                self.left.append(name)
                self.end_agent(name, loud=True)

        self.clock.after(self.rng.uniform(0.0, 0.3), leave)

    def witness_end(self, name: str) -> None:
        for other in self.agents[name].mind.configuration.voters:
            if other != name and self.net.linked(name, other):
                self.agents[other].think(el.AgentEnded(name))

    def check_covered(self) -> None:
        state = self.state
        calm = state.phase is JobPhase.RUNNING and state.repair is None and self.storage.committed() >= 0
        self.uncovered = self.uncovered or not calm

    def stop(self, agent: Agent, effect: do.StopJob) -> None:
        assert quorum.holds_lease(agent.mind, agent.now), "a leader without a lease stops the job"
        self.stopped = effect

    # --- what must hold ------------------------------------------------------------------------------------------

    def leadership(self, agent: Agent) -> None:
        term = agent.mind.term
        assert term not in self.terms, f"{agent.name} and {self.terms[term]} are leaders of term {term}"
        assert term > max(self.terms, default=-1), f"term {term} begins after {max(self.terms, default=0)}"
        self.terms[term] = agent.name
        for other in self.agents.values():
            if other is not agent and other.alive and other.mind.role is el.ElectionRole.LEADER:
                assert not quorum.holds_lease(other.mind, other.now), f"{other.name} and {agent.name} hold a lease"

    def check_epoch(self, agent: Agent) -> None:
        epoch = agent.state.epoch
        assert self.epochs.setdefault(epoch, agent.name) == agent.name or epoch == 0, f"epoch {epoch} was used before"

    def workers_node(self, worker: int, state) -> str:
        if worker in state.members:
            return state.members[worker].node
        return self.workers[worker].node

    def check_assignment(self, agent: Agent, order: do.AssignRank) -> None:
        for other in self.workers.values():
            if other.number != order.worker and self.ranks.get(other.number) == order.rank and other.alive:
                assert other.node not in agent.state.nodes, f"rank {order.rank} was taken from living {other.number}"
                assert other.suspended, f"rank {order.rank} is given away while {other.number} on {other.node} runs"

    def check_all_restored(self, agent: Agent, order: do.AttachGroups) -> None:
        owners = [self.workers[member.worker] for member in agent.state.owners()]
        stands = {(w.epoch, w.mode, w.completed, w.token) for w in owners if w.alive}
        numbers = {worker.number for worker in owners}
        for other in self.workers.values():
            if other.alive and other.node in agent.state.nodes and other.number in self.ranks:
                assert other.number in numbers, f"worker {other.number} has a rank that it does not own"
        assert len(stands) <= 1, f"attaching to epoch {order.epoch}, but the ranks differ: {stands}"

    def is_network_bad(self) -> bool:
        return False  # cuts are between nodes

    def check_not_stuck(self, agent: Agent, order: do.KillWorker) -> None:
        """Assert that no repair waits until its timeout, unless nodes could not reach one another."""
        if order.reason.startswith("no progress while"):
            since = self.clock.now - self.settings.repair_timeout_s
            apart = self.net.apart_since(since, agent.state.nodes)
            assert apart, f"the wait for worker {order.worker} timed out: {order.reason}"

    def run(self) -> str:
        """Run to the end of the job. Return the reason of its stop, or of the last fence."""
        try:
            while not self.is_over():
                assert self.clock.next() is not None, "no event is left"
                self.clock.run_next()
                assert self.clock.now < HORIZON_S, "the job never ends"
                self.check_liveness()
            self.check_end()
        except AssertionError as error:
            tail = "\n".join(self.log[-80:])
            raise AssertionError(f"{error} at {self.clock.now:.3f}\n{self.faults}\n{tail}") from error
        return self.ended_why

    def is_over(self) -> bool:
        if self.bare and self.clock.now > BARE_S:
            leaders = [agent for agent in self.agents.values() if agent.decides()]
            self.ended_why = "there is a leader" if leaders else "fenced"
            return True
        if self.stopped is not None:
            self.ended_why = self.stopped.reason
            return True
        living = [agent for agent in self.agents.values() if agent.alive and not agent.fenced]
        if living or any(worker.alive for worker in self.workers.values()):
            return False
        reasons = [agent.fenced_why for agent in self.agents.values() if agent.fenced]
        self.ended_why = "fenced: " + (reasons[-1] if reasons else "everybody was killed")
        return True

    def check_liveness(self) -> None:
        for agent in self.agents.values():
            if agent.fenced and agent.loud:
                late = [w.number for w in self.on(agent.name) if w.alive]
                assert not late, f"workers {late} outlive the fence of {agent.name}"
        leader = self.leader
        if self.bare or not leader.decides() or self.clock.now - self.troubled_at < BOUND_S:
            return
        enough = len(leader.state.nodes) >= self.settings.nodes
        at_work = (JobPhase.SETTING_UP, JobPhase.RUNNING, JobPhase.FINISHING)
        assert leader.state.phase in at_work or not enough, f"still {leader.state.phase}"

    def check_fenced(self) -> None:
        """Assert, long enough after the last fault, that agents outside every leader's majority have ended their workers."""
        if self.clock.now < self.disturbed_at + 3.6 * T:
            return
        leaders = [a for a in self.agents.values() if a.decides() and quorum.holds_lease(a.mind, a.now)]
        if len(self.faults) == 1 and self.faults[0].leaves_two_halves(self):
            assert not leaders, f"{leaders[0].name} holds a lease over half of the nodes"
        counted = {name for leader in leaders for name in (leader.name, *leader.mind.answered_at)}
        for agent in self.agents.values():
            left = [worker.number for worker in self.on(agent.name) if worker.alive and not worker.suspended]
            assert agent.name in counted or not left, (
                f"workers {left} of {agent.name} still run, although it is cut off"
            )

    def check_end(self) -> None:
        why = self.ended_why
        if self.stopped is not None and self.stopped.exit_code == 0:
            ended = [w for w in self.workers.values() if w.mode is Mode.LEAVING and w.rank is not None]
            assert all(w.completed == self.steps for w in ended), "a rank left before its last step"
            return
        if why.startswith("fenced"):
            assert not self.owed(), f"no node continues, although a majority could: {why}"
            return
        if self.bare:
            return
        lost = max(len(self.done_to), sum(agent.fenced or not agent.alive for agent in self.agents.values()))
        excuses = {
            "no place is left": lost > self.settings.spare_nodes,
            "no other came": lost > self.settings.spare_nodes,
            "no version is held": (lost > self.settings.replicas or self.uncovered) and not self.settings.durable,
            "every holder of rank": (lost > self.settings.replicas or self.uncovered) and not self.settings.durable,
            "no restart is allowed": not self.leader.state.managed,
            "is lost": not self.leader.state.managed,
            "had left the job already": self.uncovered,
            "the world was started again": self.leader.state.restarts > 2,
            "without one completed step": lost > 3,
        }
        assert any(text in why and excused for text, excused in excuses.items()), f"stopped without need: {why}"

    def owed(self) -> bool:
        """Tell whether the faults leave a majority, which must continue."""
        return all(fault.leaves_majority(self) for fault in self.faults) and len(self.faults) < 2


def leaders_simulation(seed: int, kinds: tuple[str, ...] = KINDS, *, durable: bool = False) -> Cluster:
    """Return the job of this seed."""
    rng = random.Random(f"leaders {seed}")
    settings = dataclasses.replace(
        settings_on_nodes(seed, rng),
        node_timeout_s=T,
        repair_timeout_s=5.0,
        join_timeout_s=30.0,
        max_restarts=3,
        durable=durable,
    )
    delay = rng.choice((0.0, 0.02, 0.5))
    return Cluster(seed, settings, planned(rng, kinds), steps=rng.choice((40, 120)), log_delay_s=delay)


def election_simulation(seed: int, kinds: tuple[str, ...] = (*KINDS, *("cut pair",) * 20)) -> Cluster:
    """Return the agents of this seed, without a job, on a network where single links can fail, too."""
    rng = random.Random(f"election {seed}")
    settings = Settings(world_size=1, nodes=1, spare_nodes=rng.randint(1, 5), node_timeout_s=T)
    outages = [fault for _ in range(rng.choice((1, 1, 2, 3))) for fault in planned(rng, kinds)]
    if rng.random() < 0.5:  # while the first agents join
        early_s = min(one.at for one in outages) - rng.uniform(0.05, 1.0)
        outages = [dataclasses.replace(one, at=one.at - early_s) for one in outages]
    return Cluster(seed, settings, sorted(outages, key=lambda one: one.at), steps=0, log_delay_s=0.1, bare=True)
