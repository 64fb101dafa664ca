"""Faults of a job of real agents, drawn from a seed, and the guarantees despite them.

* calm: faults that must cost no node and no leader. Connections break and lose their tails, messages are late, one machine
  pauses for a moment, or all machines pause for long.
* hard: losses, cuts and long pauses, one at a time. After each one the job must run again within a bound, with all agents.
* wild: the same faults, also several at a time. No assertion may fail, and in the end all agents continue or all have ended.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from network import Machine
from shell_job import Job, SimAgent, T
from surroundings import simulated

from deadpool_run.core import effects as do
from deadpool_run.core.leadership import voters
from deadpool_run.core.settings import Settings
from deadpool_run.core.transitions import JobPhase

KINDS = ("calm", "hard", "wild")
BOUND_S = 16 * T
"""The longest time from a fault until the job runs again."""
_OVER_S = 36 * T
_LINGER_S = 12.0
"""The longest time for a connection to close."""
_AT_WORK = (JobPhase.RUNNING, JobPhase.FINISHING)


class Story(Job):
    """A job with its faults and guarantees."""

    troubled_until = 0.0
    """Until this time, nodes may make no progress."""
    only_calm = True
    """Whether all faults so far must cost nothing."""

    def check_not_stuck(self, order: do.KillWorker) -> None:
        if self.clock.now > self.troubled_until + self.settings.repair_timeout_s:
            super().check_not_stuck(order)

    killed = 0
    """The number of workers that a fault has ended."""

    # --- state ---------------------------------------------------------------------------------------------------

    def is_well(self) -> bool:
        """Tell whether the job runs and every living agent takes part."""
        return self.whats_wrong() == ""

    def whats_wrong(self) -> str:  # noqa: PLR0911 - one reason after the other
        """Return the first defect that must not last; empty if there is none."""
        if self.leader is None:
            return "no agent has decided anything"
        leader, state = self.leader
        if not leader.lives or leader.member is None or leader.member.leader is None or not leader.holds_lease():
            return f"{leader.name} decided last, but no longer leads"
        if state.phase not in _AT_WORK or state.move is not None or state.repair is not None:
            return f"the job is {state.phase}, repair {state.repair is not None}, move {state.move is not None}"
        if state.exposed_at is not None or not state.committed:
            return "copies are missing"
        election = leader.election
        if len(election.configurations) > 1 or len(election.configuration.voters) != voters.wanted(len(state.nodes)):
            return f"the voters are {election.configurations}"
        nodes = {agent.node: agent for agent in self.living()}
        if set(nodes) != set(state.nodes):
            return f"the leader knows nodes {list(state.nodes)}, but those are {list(nodes)}"
        for agent in nodes.values():
            if (why := self._whats_wrong_with(agent, leader)) != "":
                return f"{agent.name}: {why}"
        return ""

    def _whats_wrong_with(self, agent: SimAgent, leader: SimAgent) -> str:
        mine = agent.election
        if mine is None or (mine.term, mine.configuration) != (leader.election.term, leader.election.configuration):
            return f"its configuration is {mine and mine.configuration}"
        if mine.suspended or agent.member.node.suspended:
            return "its workers are stopped"
        if agent is leader:
            return ""
        follower, followers = agent.member._follower, leader.member.leader.followers
        there = followers.connections._sessions.get(agent.node)
        if follower is None or there is None or not follower._resumed:
            return "it is not connected"
        here = follower._session
        sent = [each._dropped + len(each._unreceived) for each in (here, there)]
        if sent != [there.received, here.received]:
            return f"of {sent} messages each way {[there.received, here.received]} have arrived"
        return ""

    def progress(self) -> tuple[int, int]:
        """Return the smallest completed version of all ranks, and the committed version."""
        assert self.leader is not None
        leader = self.leader[0].member.leader if self.leader[0].member is not None else None
        committed = None if leader is None else leader._tracking.commits.committed
        ranks = [self.workers[member.worker].completed for member in self.state.owners()]
        return min(ranks, default=0), -1 if committed is None else committed

    def settle(self, within_s: float, *, or_over: bool = False) -> None:
        """Run until all is well and a version trained after that is committed."""
        deadline = self.clock.now + within_s
        goal: int | None = None
        while True:
            if or_over and not self.living():
                return
            if self.is_well():
                step, committed = self.progress()
                goal = step + 1 if goal is None else goal
                if committed >= goal:
                    return
            assert self.clock.now < deadline, (
                f"the job has not recovered after {within_s:g} s: {self.whats_wrong() or 'no progress'}"
            )
            assert or_over or self.stopped is None, f"stopped without need: {self.stopped}"
            self.sleep(0.05)

    def check_cost(self) -> None:
        """Assert that calm faults have cost no leader, no node and no repair."""
        if self.only_calm:
            assert set(self.terms) == {0}, f"another leader was elected: {self.terms}"
            assert set(self.state.nodes) == set(self.network.machines), (
                f"nodes were lost: {list(self.state.nodes)} are left"
            )
            assert len(self.state.incidents) <= self.killed, "an unexplained repair"

    def finish(self) -> None:
        """Let the ranks complete their last step. Assert that all agents end with 0."""
        self.steps = max(worker.completed for worker in self.workers.values()) + 10
        if self.rng.random() < 0.5:
            self.until(lambda: self.stopped is not None or not self.living(), _OVER_S, "the job ends")
            self.reset_some()
        self.until(lambda: not self.living(), _OVER_S, "all agents end")
        if self.stopped is not None and self.stopped.exit_code == 0:
            codes = {agent.name: agent.exit_code for agent in self.agents if not agent.loop.ended}
            assert set(codes.values()) == {0}, f"the job ended well, but its agents with {codes}"

    def check_nothing_left(self) -> None:
        self.sleep(_LINGER_S)
        alive = [worker.number for worker in self.workers.values() if worker.alive]
        assert not alive, f"workers {alive} have outlived the job"
        for loop in self.scheduler.loops:
            if not loop.ended and loop.machine.runs:
                loop.due_at()
                left = [
                    *(str(each) for each in loop.watched()),
                    *(handle for handle in loop._scheduled if not handle.cancelled()),
                ]
                assert not left, f"{loop.name} has left {left}"
        for machine in self.network.machines.values():
            assert not machine.sockets, (
                f"{machine.name} has left connections open: {[each.local for each in machine.sockets]}"
            )

    # --- faults --------------------------------------------------------------------------------------------------

    def _later(self, after_s: float, what: Callable[[], None]) -> None:
        self.clock.after(after_s, what)
        self.troubled_until = max(self.troubled_until, self.clock.now + after_s)

    def pick(self) -> Machine:
        """Return a machine with an agent, in half of the cases the leader's."""
        living = [agent.machine for agent in self.living()]
        leading = [agent.machine for agent in self.living() if agent.holds_lease()]
        return self.rng.choice(leading if leading and self.rng.random() < 0.5 else living)

    def _pairs(self, machine: Machine) -> list[tuple[str, str]]:
        """Return links of a machine: with all others or one, in both directions or one."""
        others = [name for name in self.network.machines if name != machine.name]
        if self.rng.random() < 0.3:
            others = [self.rng.choice(others)]
        out, into = [(machine.name, other) for other in others], [(other, machine.name) for other in others]
        return self.rng.choice((out + into, out + into, out, into))

    def cut(self, long_s: float, *, reject: bool = False) -> None:
        pairs = self._pairs(self.pick())
        self.note(f"!! cut for {long_s:.2f} s{' with refusals' * reject}: {pairs}")
        self.network.cut(pairs, reject=reject)

        def heal() -> None:
            self.note(f"!! healed: {pairs}")
            self.network.heal(pairs, reject=reject)

        self._later(long_s, heal)

    def pause_one(self, long_s: float) -> None:
        machine, hears = self.pick(), self.rng.random() < 0.5
        self.note(f"!! {machine.name} pauses for {long_s:.2f} s{', but for its kernel' * hears}")
        self.pause(machine.name, hears=hears)
        self._later(long_s, lambda: self._wake(machine))

    def pause_all(self, long_s: float) -> None:
        hears = self.rng.random() < 0.5
        self.note(f"!! all pause for {long_s:.2f} s{', but for their kernels' * hears}")
        for machine in self.network.machines.values():
            self.pause(machine.name, hears=hears)
            self._later(long_s + self.rng.uniform(0.0, 0.05 * T), lambda machine=machine: self._wake(machine))
        if self.rng.random() < 0.5:
            self._later(self.rng.uniform(0.0, long_s), self.kill_worker)

    def _wake(self, machine: Machine) -> None:
        self.note(f"!! {machine.name} continues")
        self.wake(machine.name)

    def reset_some(self) -> None:
        """Break one connection, or all of one machine."""
        living = self.network.living()
        if not living:
            return
        one = self.rng.choice(living)
        broken = (
            [one]
            if self.rng.random() < 0.6
            else [each for each in living if one.machine in (each.machine, each.peer.machine)]
        )
        both = self.rng.random() < 0.7
        for either in broken:
            each = either if self.rng.random() < 0.5 else either.peer
            self.note(
                f"!! reset {each.machine.name} - {each.peer.machine.name}{'' if both else ', of which the latter hears nothing'}"
            )
            self.network.reset(each, both=both)

    def slow_down(self) -> None:
        self.note("!! slow")
        self.network.slow_until = self.clock.now + self.rng.uniform(0.5, 3.0)

    def kill_worker(self) -> None:
        alive = [worker for worker in self.workers.values() if worker.alive]
        if alive:
            worker = self.rng.choice(alive)
            self.note(f"!! worker {worker.number} dies")
            self.killed += 1
            worker.die(signal=9)

    def end_one(self, again_s: float | None) -> None:
        """Kill an agent, or cut its machine's power. It starts again after `again_s` unless that is None."""
        machine, power = self.pick(), self.rng.random() < 0.4
        again = "for good" if again_s is None else f"for {again_s:.2f} s"
        self.note(f"!! {machine.name} {'has no power' if power else 'has no agent any more'}, {again}")
        self.kill(machine.name, power=power)
        if again_s is not None:
            self._later(again_s, lambda: self.agent_on(machine.name) or self.start(machine.name))

    # --- stories -------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        for name in self.network.machines:
            self.clock.after(self.rng.uniform(0.0, 1.0), lambda name=name: self.start(name))
        self.until(lambda: self.leader is not None, 10.0, "the job is founded")
        self.settle(BOUND_S)

    def calm_fault(self, *, alone: bool = False) -> None:
        """Inject a fault that must cost nothing. `alone`: no other fault lasts at the same time."""
        draw = self.rng.random()
        if alone and draw >= 0.5 and self.clock.now < self.troubled_until + 0.4 * T:
            self.sleep(self.troubled_until + 0.4 * T - self.clock.now)
        if draw < 0.5:
            self.reset_some()
        elif draw < 0.6:
            self.slow_down()
        elif draw < 0.7:
            self.pause_one(self.rng.uniform(0.05, 0.3) * T)
        elif draw < 0.8:
            # Not about the time that a node waits for a leader: it would not notice that a pause of this length was one.
            self.pause_all(self.rng.choice((0.5, 1.2, 2.0, 6.0)) * T)
        elif draw < 0.9:
            self.cut(self.rng.uniform(0.05, 0.3) * T, reject=self.rng.random() < 0.3)
        else:
            self.kill_worker()

    def hard_fault(self, *, spared: bool, refused: bool = True) -> None:
        """Inject a fault that may cost a machine. `spared`: the machine may stay away.

        `refused`: a cut may refuse connections. If only two agents vote, both can become leader then (decision 44).
        """
        self.only_calm = False
        if self.rng.random() < 0.3:
            self.note("!! new connections break")
            self.network.flaky_until = self.clock.now + 2 * T
        draw, long_s = (
            self.rng.random(),
            self.rng.choice((0.4, 0.8, 1.0, 1.3, 2.0, 4.5, 7.0)) * T * self.rng.uniform(0.8, 1.2),
        )
        if draw < 0.35:
            self.cut(long_s, reject=refused and self.rng.random() < 0.3)
        elif draw < 0.6:
            self.pause_one(long_s)
            if self.rng.random() < 0.5:
                self._later(self.rng.uniform(0.0, 0.8 * T), self.kill_worker)
        else:
            self.end_one(None if spared and self.rng.random() < 0.5 else self.rng.uniform(0.05, 5.0) * T)

    def live(self, kind: str) -> None:
        """Run a story of this kind to its end."""
        self.begin()
        for _ in range(self.rng.randint(2, 5)):
            self.sleep(self.rng.uniform(0.0, 1.5))
            getattr(self, f"_{kind}")()
        self.sleep(max(0.0, self.troubled_until - self.clock.now))
        self.settle(_OVER_S, or_over=kind == "wild")
        self.check_cost()
        if self.living():
            self.finish()
        self.check_nothing_left()

    def _calm(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            self.calm_fault(alone=True)
            self.sleep(self.rng.uniform(0.0, 1.0))
        self.sleep(max(0.0, self.troubled_until - self.clock.now))
        self.settle(BOUND_S)
        self.check_cost()

    def _hard(self) -> None:
        if self.rng.random() < 0.4:
            self.calm_fault()
        if len(self.living()) == len(self.state.nodes) > max(2, self.settings.nodes):
            self.hard_fault(spared=len(self.state.nodes) > max(3, self.settings.nodes + 1))
        if (draw := self.rng.random()) < 0.5:
            self.sleep(self.rng.uniform(0.0, 1.5) * T)
            self.reset_some() if draw < 0.25 else self.kill_worker()
        self.sleep(max(0.0, self.troubled_until - self.clock.now))
        self.settle(BOUND_S)

    def _wild(self) -> None:
        if self.living():
            if self.rng.random() < 0.4:
                self.reset_some()
            else:
                self.hard_fault(spared=self.rng.random() < 0.3, refused=False)
        self.sleep(self.rng.choice((0.1, 0.7, 2.0, 5.0)) * self.rng.random() * T)


def settings(machines: int, ranks_per_node: int = 1) -> Settings:
    """Return settings for a job on this number of machines. Of three or four one is a spare, of five two are."""
    spare_nodes = 1 if machines < 5 else 2
    return Settings(
        world_size=(machines - spare_nodes) * ranks_per_node,
        nodes=machines - spare_nodes,
        spare_nodes=spare_nodes,
        node_timeout_s=T,
        repair_timeout_s=12.0,
        shutdown_timeout_s=3.0,
        join_timeout_s=60.0,
        max_restarts=3,
    )


def tell(seed: int, kind: str) -> list[str]:
    """Run a story and return its log. Raises AssertionError."""
    rng = random.Random(f"shells {seed}")
    machines = rng.choice((3, 4, 5))
    with simulated(seed, machines, settings(machines, rng.choice((1, 1, 2))), Story) as job:
        job.live(kind)
        return job.log
