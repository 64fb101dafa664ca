"""Several agents, any of which may be the head: the real core and the real election against a network that is cut.

Each agent has its own clock. Orders carry the head's term; the log reaches the standbys late. Safety is asserted at each
takeover, by every agent that is told something, by the workers, and after every decision; liveness by bounds.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterable

from machine import Clock
from net import CutGathering, CutStorage, Net
from workers import Mode, Worker

from deadpool_run.core import coordinator, election
from deadpool_run.core import effects as do
from deadpool_run.core import electorate as el
from deadpool_run.core import events as ev
from deadpool_run.core.lifecycle import JobPhase
from deadpool_run.core.settings import Settings

T = 2.0
"""The node time-out, in seconds."""
BEAT_S = T / 5
BOUND_S = 40.0
HORIZON_S = 600.0

ANNOUNCED = (do.Announce, do.ReportIncident, do.SetCaptureInterval)


def obeys(mine: int, theirs: int) -> bool:
    """Tell whether an agent that follows the head of term `mine` obeys an order of term `theirs`."""
    return mine == theirs


def rebased(own_now: float, last_now: float, heard_at: float) -> float:
    """Return the time of the state at `own_now`: the last entry's, and what passed since it came, on this clock."""
    return last_now + (own_now - heard_at)


class Agent:
    def __init__(self, cluster: Cluster, name: str, mind: el.Agent) -> None:
        self.cluster, self.name, self.mind = cluster, name, mind
        self.skew = cluster.skews.setdefault(name, cluster.rng.uniform(0.0, 1000.0))
        self.alive, self.loud = True, False
        """Loud: its process was killed, so that its host tells the others."""
        self.found: dict[int, ev.WorkerFound] = {}
        self.discarded = (0, -1)
        self.log: list[tuple[float, ev.Event]] = []
        self.log_term, self.log_heard_at = 0, 0.0
        self.state = coordinator.new_state(cluster.settings)
        self.resynced = 0
        self.deciding = False
        self.origin = 0.0
        self.seq = 0
        self.early: list[ev.Event] = []
        self.plan = 0
        self.fenced_why = ""

    # --- its clock -----------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.cluster.clock.now + self.skew

    @property
    def fenced(self) -> bool:
        return self.mind.role is el.Role.FENCED

    def arm(self) -> None:
        """Keep one alarm: the next deadline of the election's and the coordinator's."""
        self.plan += 1
        plan, dues = self.plan, [election.next_deadline(self.mind)]
        if self.decides():
            at = coordinator.next_deadline(self.cluster.settings, self.state)
            dues.append(None if at is None else at - self.origin)
        due = min((at for at in dues if at is not None), default=None)
        if due is not None:
            self.cluster.clock.at(due - self.skew + 1e-9, lambda: self.alarm(plan))

    def alarm(self, plan: int) -> None:
        if plan != self.plan or not self.alive:
            return
        self.think(el.Tick())
        if self.decides():
            due = coordinator.next_deadline(self.cluster.settings, self.state)
            if due is not None and due <= self.now + self.origin:
                self.decide(ev.TimeAdvanced())
        self.arm()

    # --- the election --------------------------------------------------------------------------------------------

    def decides(self) -> bool:
        return self.alive and self.mind.role is el.Role.HEAD and self.deciding

    def think(self, event: el.Event) -> None:
        if not self.alive or self.fenced:
            return
        before = self.mind
        self.mind, outputs = election.step(before, event, self.now)
        assert self.mind.term >= before.term, f"a term fell: {before.term}, {self.mind.term}"
        assert self.mind.promised >= before.promised, "a promise was taken back"
        if outputs or not isinstance(event, (el.Tick, el.HeardFromAgent, el.HeardFromHead, el.LogFollowed)):
            self.cluster.note(f"{self.name} hears {event}: {outputs}")
        for output in outputs:
            self.act(output)
        self.arm()

    def act(self, output: el.Output) -> None:  # noqa: C901 - one case for each output
        match output:
            case el.AskVotes():
                for other in self.mind.roster.agents:
                    if other != self.name:
                        self.send(other, lambda a, me=self.name: a.think(output.asked) or a.refuse(me))
            case el.GiveVote():
                self.send(output.candidate, lambda a: a.think(output.vote))
            case el.Claim():
                self.beat(output.term, output.rosters)
            case el.TakeOver():
                self.take_over(output)
            case el.ShareRoster():
                self.beat(self.mind.term, output.rosters)
                self.share_log()
            case el.LoseNode():
                self.decide(ev.NodeLost(output.node, output.reason))
            case el.Fence():
                self.fence(output.reason)

    def refuse(self, asker: str) -> None:
        """A host tells who asks that nobody listens here."""
        if self.loud and self.cluster.net.linked(asker, self.name):
            self.cluster.agents[asker].think(el.AgentEnded(self.name))

    def beat(self, term: int, rosters: tuple[el.Roster, ...]) -> None:
        sent_at = self.now
        for other in rosters[-1].agents:
            if other != self.name:
                self.send(other, lambda a: a.hear_beat(self.name, term, rosters, sent_at))

    def hear_beat(self, head: str, term: int, rosters: tuple[el.Roster, ...], sent_at: float) -> None:
        if not self.alive or self.fenced:
            return
        self.think(el.HeardFromHead(term, rosters))
        if self.fenced or self.mind.term != term or self.mind.roster.head != head:
            return
        known = self.mind.roster.number
        self.send(head, lambda a: a.think(el.HeardFromAgent(self.name, term, sent_at, known)))
        self.resync(head, term)

    def resync(self, head: str, term: int) -> None:
        """Once for each head: say what is here."""
        if self.resynced < term:
            self.resynced = term
            workers = tuple(self.found.values())
            told = ev.NodeResynced(self.name, workers, self.discarded)
            self.send(head, lambda a: a.told(told, term))

    def keep_beating(self) -> None:
        if self.alive and self.mind.role is el.Role.HEAD:
            self.beat(self.mind.term, self.mind.rosters)
            self.cluster.clock.after(BEAT_S, self.keep_beating)

    def fence(self, reason: str) -> None:
        self.fenced_why = reason
        self.deciding = False
        for worker in self.cluster.on(self.name):
            self.cluster.clock.after(self.cluster.rng.uniform(0.0, 0.2 * T), worker.vanish)
        self.cluster.clock.after(0.25 * T, lambda: self.cluster.closed(self.name))

    # --- the coordinator -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.deciding = True
        self.keep_beating()
        self.cluster.authority(self)
        self.decide(ev.JobSubmitted(self.name, self.cluster.place(self.name)))
        self.watch_commit()

    def take_over(self, output: el.TakeOver) -> None:
        for now, event in self.log:
            self.state, _ = coordinator.step(self.cluster.settings, self.state, event, now)
        last = self.log[-1][0] if self.log else 0.0
        self.origin = rebased(self.now, last, self.log_heard_at) - self.now
        self.log_term = output.term
        self.cluster.authority(self)
        self.deciding = True
        self.keep_beating()
        self.decide(ev.CoordinatorMoved(output.term, self.name))
        self.share_log()
        self.resync(self.name, output.term)
        for event in self.early:
            self.told(event, output.term)
        self.watch_commit()

    def told(self, event: ev.Event, term: int) -> None:
        """A fact comes from an agent that follows this one as the head of the term."""
        if self.decides() and term == self.mind.term:
            self.decide(event)
        elif self.mind.bid == term:
            self.early.append(event)

    def decide(self, event: ev.Event) -> None:
        if not self.decides() or self.cluster.stopped is not None:
            return
        if isinstance(event, ev.NodeResynced) and event.node not in self.mind.roster.agents:
            return
        before, now = self.state, self.now + self.origin
        self.state, effects = coordinator.step(self.cluster.settings, before, event, now)
        self.cluster.note(f"  {self.name} t{self.mind.term} {now:.3f} {event}")
        for effect in effects:
            self.cluster.note(f"             -> {effect}")
        coordinator.check_invariants(self.cluster.settings, self.state)
        assert self.state.epoch >= before.epoch, "an epoch fell"
        self.cluster.check_epoch(self)
        self.log.append((now, event))
        self.mind, _ = election.step(self.mind, el.LogFollowed(el.LogIndex(self.mind.term, len(self.log))), self.now)
        for standby in self.mind.roster.standbys:
            self.send_entry(standby, len(self.log) - 1, now, event)
        for effect in effects:
            self.perform(effect)
        self.arm()

    def send_entry(self, standby: str, index: int, now: float, event: ev.Event) -> None:
        term = self.mind.term
        delay = self.cluster.rng.uniform(0.0, self.cluster.log_delay_s)
        follow = lambda a: a.follow(term, index, now, event)  # noqa: E731
        self.cluster.clock.after(delay, lambda: self.send(standby, follow))

    def share_log(self) -> None:
        """Whoever is a standby now gets the whole log."""
        term, entries = self.mind.term, list(self.log)
        for standby in self.mind.roster.standbys:
            self.send(standby, lambda a: a.follow_all(term, entries))

    def follow_all(self, term: int, entries: list[tuple[float, ev.Event]]) -> None:
        if term == self.mind.term and self.alive and (term, len(entries)) > (self.log_term, len(self.log)):
            self.log, self.log_term, self.log_heard_at = list(entries), term, self.now
            self.think(el.LogFollowed(el.LogIndex(term, len(self.log))))

    def follow(self, term: int, index: int, now: float, event: ev.Event) -> None:
        if term != self.mind.term or self.log_term != term or not self.alive or index < len(self.log):
            return
        waiting = self.cluster.gaps.setdefault((self.name, term), {})
        waiting[index] = (now, event)
        while len(self.log) in waiting:
            self.log.append(waiting.pop(len(self.log)))
            self.log_heard_at = self.now
        self.think(el.LogFollowed(el.LogIndex(term, len(self.log))))

    def perform(self, effect: do.Effect) -> None:
        self.seq += 1
        term, key = self.mind.term, (self.mind.term, self.seq, 0)
        match effect:
            case do.StopJob():
                self.cluster.stop(self, effect)
            case do.Announce() | do.ReportIncident() | do.SetCaptureInterval():
                pass
            case do.BeginGeneration() | do.SetBuddies() | do.DiscardAbove():
                epoch = self.state.epoch
                for other in self.state.nodes:
                    self.order(other, effect, term, key, epoch)
            case do.StartWorker() | do.ReportReplicas():
                self.order(effect.node, effect, term, key, self.state.epoch)
            case _:
                if isinstance(effect, do.AssignRank):
                    self.cluster.check_assignment(self, effect)
                if isinstance(effect, do.AttachGroups):
                    self.cluster.check_all_restored(self, effect)
                node = self.cluster.workers_node(effect.worker, self.state)
                self.order(node, effect, term, key, self.state.epoch)

    def order(self, node: str, effect: do.Effect, term: int, key: tuple[int, int, int], epoch: int) -> None:
        self.send(node, lambda a: a.obey(effect, term, key, epoch))

    def watch_commit(self) -> None:
        storage = self.cluster.storage
        if self.decides() and self.cluster.stopped is None:
            if self.state.buddies and not self.state.committed and storage.committed() >= 0 and not self.state.move:
                self.decide(ev.SnapshotCommitted(storage.committed(), self.state.epoch))
            self.cluster.clock.after(0.05, self.watch_commit)

    # --- its node ------------------------------------------------------------------------------------------------

    def send(self, target: str, what: Callable[[Agent], None]) -> None:
        if self.alive:
            self.cluster.net.send(self.name, target, lambda: what(self.cluster.agents[target]))

    def obey(self, effect: do.Effect, term: int, key: tuple[int, int, int], epoch: int) -> None:  # noqa: PLR0912, C901
        """Carry out an order of the head of that term."""
        if not self.alive or self.fenced or not obeys(self.mind.term, term):
            return
        self.cluster.note(f"        {self.name} obeys t{term} {effect}")
        cluster, storage = self.cluster, self.cluster.storage
        match effect:
            case do.BeginGeneration():
                assert all(w.rank is None or not w.alive for w in cluster.on(self.name)), "the old world still lives"
                storage.clear_on(self.name, key)
                self.found = {number: found for number, found in self.found.items() if found.alive}
            case do.StartWorker():
                assert effect.worker not in cluster.workers, "a worker's number was given again"
                worker = cluster.workers[effect.worker] = Worker(cluster, effect.worker, effect.node)
                self.found[effect.worker] = ev.WorkerFound(effect.worker, 1000 + effect.worker)
                worker.start()
            case do.SetBuddies():
                storage.set_buddies_on(self.name, effect.buddies, key, epoch)
            case do.DiscardAbove():
                self.discarded = max(self.discarded, (effect.epoch, effect.version))
                storage.discard_on(self.name, effect.epoch, effect.version)
            case do.ReportReplicas():
                held = tuple(sorted(storage.nodes[self.name].has(effect.rank)))
                self.report(ev.ReplicasReported(self.name, effect.rank, effect.epoch, held))
            case do.KillWorker() | do.TerminateWorker():
                worker = cluster.workers[effect.worker]
                cluster.clock.after(cluster.rng.uniform(0.0, 0.1), lambda: worker.die(signal=9))
            case do.AssignRank():
                cluster.ranks[effect.worker] = effect.rank
                self.know(effect.worker, rank=effect.rank, epoch=effect.epoch)
                storage.assign_on(self.name, effect.rank, key, known_there=effect.transcript_from is None)
                self.pass_on(effect)
            case do.AbortStep():
                self.know(effect.worker, finished=False)
                self.pass_on(effect)
            case do.ReleaseWorker():
                self.know(effect.worker, released=True)
                self.pass_on(effect)
            case _:
                self.pass_on(effect)

    def pass_on(self, effect: do.Effect) -> None:
        worker = self.cluster.workers[effect.worker]
        worker.down.send(lambda: worker.obey(effect))

    def know(self, worker: int, **changes: object) -> None:
        if worker in self.found:
            self.found[worker] = dataclasses.replace(self.found[worker], **changes)

    def said(self, event: ev.Event) -> None:
        """One of its workers said something, or ended."""
        match event:
            case ev.WorkerReady():
                self.know(event.worker, ready=True)
            case ev.ScriptInitialized():
                self.know(event.worker, initialized=True)
            case ev.LoopFinished():
                self.know(event.worker, finished=True)
            case ev.WorkerExited():
                self.know(event.worker, code=event.code, signal=event.signal)
        self.report(event)

    def report(self, event: ev.Event) -> None:
        if self.alive and not self.fenced:
            term, head = self.mind.term, self.mind.roster.head
            self.send(head, lambda a: a.told(event, term))


class Cluster:
    """One job on several nodes, with what befalls them as data."""

    def __init__(
        self, seed: int, settings: Settings, faults: Iterable[Fault], *, steps: int, log_delay_s: float
    ) -> None:
        self.rng = random.Random(seed)
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
        self.faults = list(faults)
        self.done_to: list[str] = []
        self.troubled_at = 0.0
        self.stopped: do.StopJob | None = None
        self.ended_why = ""
        self.uncovered = False
        self.log: list[str] = []
        names = [f"n{at}" for at in range(settings.nodes + settings.spare_nodes)]
        first = names[0]
        self.storage.join(first)
        self.agents[first] = Agent(self, first, election.first_head(first, T, self.skews.setdefault(first, 500.0)))
        for name in names[1:]:
            self.clock.after(self.rng.uniform(0.0, 1.0), lambda name=name: self.join(name))
        for fault in self.faults:
            self.clock.at(fault.at, lambda fault=fault: fault.befall(self))
        self.agents[first].begin()

    # --- for workers ---------------------------------------------------------------------------------------------

    @property
    def state(self):
        return self.head.state

    @property
    def head(self) -> Agent:
        return self.agents[self.terms[max(self.terms)]]

    def tell(self, event: ev.Event) -> None:
        self.agents[self.workers[event.worker].node].said(event)

    # --- the world -----------------------------------------------------------------------------------------------

    def note(self, line: str) -> None:
        self.log.append(f"{self.clock.now:9.4f} {line}")

    def place(self, name: str) -> ev.Place:
        return ev.Place(name=name)

    def on(self, name: str) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.node == name]

    def join(self, name: str) -> None:
        """An agent comes up and finds the head, if it can be reached."""
        head = self.head
        if self.stopped is not None or self.clock.now > 60.0:
            return
        if not head.decides() or not self.net.linked(name, head.name):
            self.clock.after(0.5, lambda: self.join(name))
            return
        self.storage.join(name)
        head.think(el.AgentJoined(name))
        if head.fenced:
            return
        mind = election.follower(name, T, head.mind.term, head.mind.rosters, self.clock.now)
        agent = self.agents[name] = Agent(self, name, mind)
        agent.mind = dataclasses.replace(mind, heard_at=agent.now)
        agent.resynced = head.mind.term
        agent.arm()
        head.beat(head.mind.term, head.mind.rosters)
        head.decide(ev.NodeJoined(name, self.place(name)))
        self.troubled_at = self.clock.now

    def closed(self, name: str) -> None:
        """An agent's process has ended, or has fenced itself and closed its connections: who can hear of it does."""
        agent = self.agents[name]
        agent.loud = True
        self.storage.lose(name)
        for other in self.agents.values():
            if other.alive and not other.fenced and other.name != name:
                arrive = lambda other=other: self.hear_closed(other, name)  # noqa: E731
                self.net.send(name, other.name, arrive)

    def hear_closed(self, other: Agent, name: str) -> None:
        if other.mind.roster.head == name and other.mind.role is not el.Role.HEAD:
            other.think(el.LinkBroken(closed=True))
        elif other.mind.role is el.Role.HEAD:
            other.think(el.AgentEnded(name))

    def end_agent(self, name: str, *, loud: bool) -> None:
        """Its process is killed, and its nursery ends its workers; or its host is gone."""
        agent = self.agents[name]
        agent.alive = False
        self.check_covered()
        for worker in self.on(name):
            worker.vanish() if not loud else self.clock.after(self.rng.uniform(0.0, 0.05), worker.vanish)
        self.storage.lose(name)
        if loud:
            self.closed(name)

    def check_covered(self) -> None:
        state = self.state
        calm = state.phase is JobPhase.RUNNING and state.repair is None and self.storage.committed() >= 0
        self.uncovered = self.uncovered or not calm

    def stop(self, agent: Agent, effect: do.StopJob) -> None:
        assert election.has_authority(agent.mind, agent.now), "a head without authority stops the job"
        self.stopped = effect

    # --- what must hold ------------------------------------------------------------------------------------------

    def authority(self, agent: Agent) -> None:
        term = agent.mind.term
        assert term not in self.terms, f"{agent.name} and {self.terms[term]} are heads of term {term}"
        assert term > max(self.terms, default=-1), f"term {term} begins after {max(self.terms, default=0)}"
        self.terms[term] = agent.name
        for other in self.agents.values():
            if other is not agent and other.alive and other.mind.role is el.Role.HEAD:
                assert not election.has_authority(other.mind, other.now), (
                    f"{other.name} and {agent.name} have authority"
                )

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

    def check_all_restored(self, agent: Agent, order: do.AttachGroups) -> None:
        owners = [self.workers[member.worker] for member in agent.state.owners()]
        stands = {(w.epoch, w.mode, w.completed, w.token) for w in owners if w.alive}
        assert len(stands) <= 1, f"attaching to epoch {order.epoch}, but the ranks stand at {stands}"

    def run(self) -> str:
        """Return how it ended: the reason of the stop, or of the last fence."""
        try:
            while not self.is_over():
                assert self.clock.next() is not None, "nothing will ever happen again"
                self.clock.run_next()
                assert self.clock.now < HORIZON_S, "the job never ends"
                self.check_liveness()
            self.check_end()
        except AssertionError as error:
            tail = "\n".join(self.log[-80:])
            raise AssertionError(f"{error} at {self.clock.now:.3f}\n{self.faults}\n{tail}") from error
        return self.ended_why

    def is_over(self) -> bool:
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
        head = self.head
        if not head.decides() or self.clock.now - self.troubled_at < BOUND_S:
            return
        enough = len(head.state.nodes) >= self.settings.nodes
        at_work = (JobPhase.UNPROTECTED, JobPhase.RUNNING, JobPhase.FINISHING)
        assert head.state.phase in at_work or not enough, f"still {head.state.phase}"

    def check_end(self) -> None:
        why = self.ended_why
        if self.stopped is not None and self.stopped.exit_code == 0:
            ended = [w for w in self.workers.values() if w.mode is Mode.LEAVING and w.rank is not None]
            assert all(w.completed == self.steps for w in ended), "a rank left before its last step"
            return
        if why.startswith("fenced"):
            assert not self.owed(), f"nobody goes on, though a majority could: {why}"
            return
        lost = len(self.done_to)
        excuses = {
            "no place is left": lost > self.settings.spare_nodes,
            "no other came": lost > self.settings.spare_nodes,
            "no version is held": lost > self.settings.replicas or self.uncovered,
            "every holder of rank": lost > self.settings.replicas or self.uncovered,
            "no restart is allowed": not self.head.state.managed,
            "is lost": not self.head.state.managed,
            "had left the job already": self.uncovered,
            "the world was started again": self.head.state.restarts > 2,
            "without one completed step": lost > 3,
        }
        assert any(text in why and excused for text, excused in excuses.items()), f"stopped without need: {why}"

    def owed(self) -> bool:
        """Tell whether what befell the job leaves a majority that is bound to go on."""
        return all(fault.leaves_majority(self) for fault in self.faults) and len(self.faults) < 2


@dataclasses.dataclass(frozen=True)
class Fault:
    """Something that befalls the job. `whom` picks nodes; `kind` says what becomes of them."""

    at: float
    kind: str
    whom: int = 0
    heal_after: float | None = None

    def befall(self, cluster: Cluster) -> None:
        if cluster.stopped is not None:
            return
        cluster.note(f"!! {self}")
        living = [a.name for a in cluster.agents.values() if a.alive and not a.fenced]
        cluster.troubled_at = cluster.clock.now + (self.heal_after or 0.0) + 4 * T
        if not living:
            return
        head = cluster.head.name if cluster.head.name in living else living[0]
        whom = head if self.kind.endswith("head") else living[self.whom % len(living)]
        match self.kind.split()[0]:
            case "kill" | "power":
                cluster.done_to.append(whom)
                cluster.end_agent(whom, loud=self.kind.startswith("kill"))
            case "worker":
                alive = [w for w in cluster.workers.values() if w.alive]
                if alive:
                    alive[self.whom % len(alive)].die(signal=9)
            case "cut":
                self.cut(cluster, living, whom)

    def cut(self, cluster: Cluster, living: list[str], whom: str) -> None:
        """Split the living in two (`whom` among the smaller part), or cut one direction of one node's links."""
        others = [name for name in living if name != whom]
        part = [whom] if "half" not in self.kind else [whom, *others[: max(0, len(living) // 2 - 1)]]
        rest = [name for name in living if name not in part]
        out = [(a, b) for a in part for b in rest]
        into = [(b, a) for a in part for b in rest]
        pairs = out if "deaf" in self.kind else into if "mute" in self.kind else out + into
        cluster.done_to += part
        cluster.check_covered()
        cluster.net.cut(pairs)
        if self.heal_after is not None:
            cluster.clock.after(self.heal_after, lambda: self.heal(cluster, pairs))

    def heal(self, cluster: Cluster, pairs: list[tuple[str, str]]) -> None:
        cluster.note(f"!! healed: {pairs}")
        cluster.net.heal(pairs)
        cluster.gathering.healed()
        cluster.troubled_at = cluster.clock.now + 4 * T

    def leaves_majority(self, cluster: Cluster) -> bool:
        nodes = cluster.settings.nodes + cluster.settings.spare_nodes
        if self.at < 1.5:
            return False  # not all have joined
        match self.kind.split()[0]:
            case "kill":
                return True
            case "power":
                return nodes > 2
            case "cut":
                return nodes > 2 and "half" not in self.kind
        return True


KINDS = (
    *("kill head", "kill head", "kill head", "power head", "kill any", "power any", "worker", "worker"),
    *("cut head", "cut any", "cut half any", "cut half head", "cut deaf head", "cut mute head", "cut deaf", "cut mute"),
)


def planned(rng: random.Random, kinds: tuple[str, ...]) -> tuple[Fault, ...]:
    at = rng.choice((rng.uniform(1.5, 6.0), rng.uniform(0.3, 3.0), rng.uniform(2.0, 5.0)))
    faults = []
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3))):
        heal = rng.choice((None, rng.uniform(0.1, 0.8) * T, rng.uniform(0.8, 4.0) * T))
        faults.append(Fault(at, rng.choice(kinds), rng.randrange(12), heal))
        at += rng.choice((rng.uniform(0.0, 0.3), rng.uniform(0.0, 1.5), rng.uniform(0.0, 6.0)))
    return tuple(faults)


def heads_simulation(seed: int, kinds: tuple[str, ...] = KINDS) -> Cluster:
    """Return the job of this seed."""
    rng = random.Random(f"heads {seed}")
    nodes = rng.randint(2, 4)
    settings = Settings(
        world_size=nodes * rng.randint(1, 2),
        nodes=nodes,
        spare_nodes=rng.randint(0, 2),
        spares=rng.choice((0, 0, 2)),
        replicas=rng.choice((1, 1, 2)),
        node_timeout_s=T,
        repair_timeout_s=5.0,
        shutdown_timeout_s=3.0,
        join_timeout_s=30.0,
        max_restarts=3,
    )
    delay = rng.choice((0.0, 0.02, 0.5))
    return Cluster(seed, settings, planned(rng, kinds), steps=rng.choice((40, 120)), log_delay_s=delay)
