"""A simulated agent: its part in the election, its coordinator while it is the leader, and its work on its node.

Each agent has its own clock. Orders carry the leader's term. The log reaches log followers late. Invariants are asserted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kit.invariants import check_invariants
from node_side import NodeSide
from storage import kept

from deadpool_run.core import coordinator
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.leadership import election, quorum
from deadpool_run.core.leadership import electorate as el

if TYPE_CHECKING:
    from leaders import Cluster

T = 2.0
"""The node timeout, in seconds."""
HEARTBEAT_S = T / 5


def rebased(own_now: float, last_now: float, heard_at: float) -> float:
    """Return the state's time at `own_now`: the time of the last entry, plus the time since its arrival on this clock."""
    return last_now + (own_now - heard_at)


class Agent(NodeSide):
    def __init__(self, cluster: Cluster, name: str, mind: el.Agent) -> None:
        self.cluster, self.name, self.mind = cluster, name, mind
        self.skew = cluster.skews.setdefault(name, cluster.rng.uniform(0.0, 1000.0))
        self.alive, self.loud = True, False
        """`loud`: only its process was killed, so its host still refuses connections."""
        self.found: dict[int, ev.WorkerFound] = {}
        self.discards: tuple[tuple[int, int], ...] = ()
        self.log: list[tuple[float, ev.Event]] = []
        self.log_term, self.log_heard_at = 0, 0.0
        self.state = coordinator.new_state(cluster.settings)
        self.resynced = 0
        self.deciding = False
        self.origin = 0.0
        self.seq = 0
        self.early: list[ev.Event] = []
        self.losses: list[ev.NodeLost] = []
        self.reports: list[ev.RankReport] = []
        self.plan = 0
        self.fenced_why = ""
        self.answered: dict[str, float] = {}
        """For each agent, the time when the newest heartbeat that it answered was sent."""
        self.members: set[str] = set()
        """Agents that have answered this leader, except those that it has given up."""
        self.held_at: float | None = None
        self.waiting: list[ev.Event] = []
        """Events that arrived while this leader lacked a lease."""

    # --- its clock -----------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.cluster.clock.now + self.skew

    @property
    def fenced(self) -> bool:
        return self.mind.role is el.ElectionRole.FENCED

    def arm(self) -> None:
        """Set the alarm to the next deadline of the election or the coordinator."""
        self.plan += 1
        plan, dues = self.plan, [election.next_deadline(self.mind)]
        if self.decides() and self.held_at is None:
            at = coordinator.next_deadline(self.cluster.settings, self.state)
            dues.append(None if at is None else at - self.origin)
        due = min((at for at in dues if at is not None), default=None)
        if due is not None:
            self.cluster.clock.at(due - self.skew + 1e-9, lambda: self.alarm(plan))

    def alarm(self, plan: int) -> None:
        if plan != self.plan or not self.alive:
            return
        self.think(el.Tick())
        due = election.next_deadline(self.mind)
        assert due is None or due > self.now, "time stands still"
        if self.decides() and self.held_at is None:
            due = coordinator.next_deadline(self.cluster.settings, self.state)
            if due is not None and due <= self.now + self.origin:
                self.decide(ev.TimeAdvanced())
        self.arm()

    # --- the election --------------------------------------------------------------------------------------------

    def decides(self) -> bool:
        return self.alive and self.mind.role is el.ElectionRole.LEADER and self.deciding

    def think(self, event: el.Event) -> None:
        if not self.alive or self.fenced:
            return
        before = self.mind
        self.mind, outputs = election.step(before, event, self.now)
        assert self.mind.term >= before.term, f"a term fell: {before.term}, {self.mind.term}"
        assert self.mind.voted_term >= before.voted_term, "a voted term fell"
        if outputs or not isinstance(event, (el.Tick, el.HeardFromAgent, el.HeardFromLeader, el.LogFollowed)):
            self.cluster.note(f"{self.name} hears {event}: {outputs}")
        for output in outputs:
            self.act(output)
        if before.role is el.ElectionRole.LEADER is not self.mind.role:
            self.resign()
        self.go_on()
        self.arm()

    def resign(self) -> None:
        """Stop leading. After another election, it starts from its log."""
        self.deciding, self.held_at = False, None
        self.state = coordinator.new_state(self.cluster.settings)
        self.waiting, self.members, self.answered, self.reports = [], set(), {}, []

    def go_on(self) -> None:
        """Keep events while the leader lacks a lease, and decide on them afterwards. The job's clock stops meanwhile."""
        if not self.decides():
            return
        if not quorum.holds_lease(self.mind, self.now):
            self.held_at = self.now if self.held_at is None else self.held_at
        elif self.held_at is not None:
            self.origin -= self.now - self.held_at
            self.held_at = None
            waiting, self.waiting = self.waiting, []
            for event in waiting:
                self.decide(event)

    def act(self, output: el.Output) -> None:  # noqa: PLR0912 - one case for each output
        match output:
            case el.RequestVotes():
                for other in output.voters:
                    self.send(other, lambda a, me=self.name: a.think(output.asked) or a.refuse(me))
            case el.GiveVote():
                self.send(output.candidate, lambda a: a.think(output.vote))
            case el.ClaimLeadership():
                others = {voter for each in output.configurations for voter in each.voters}
                self.send_configurations(others, output.configurations)
            case el.TakeOver():
                self.take_over()
            case el.ShareConfiguration():
                self.heartbeat()
                self.share_log()
            case el.LoseNode():
                evicted = el.Evicted(self.mind.term, output.reason)
                self.send(output.node, lambda a: a.think(evicted))
                self.members.discard(output.node)
                if not self.losses:
                    self.cluster.clock.after(0.0, self.tell_losses)
                self.losses.append(ev.NodeLost(output.node, output.reason))
            case el.SuspendWorkers():
                self.cluster.storage.suspended.add(self.name)
                for worker in self.cluster.on(self.name):
                    worker.suspend()
            case el.ResumeWorkers():
                self.cluster.storage.suspended.discard(self.name)
                for worker in self.cluster.on(self.name):
                    worker.resume()
            case el.Fence():
                self.fence(output.reason)

    def tell_losses(self) -> None:
        """Report all nodes that were found lost at the same time in one event."""
        losses, self.losses = tuple(self.losses), []
        self.decide(losses[0] if len(losses) == 1 else ev.NodesLost(losses))

    def refuse(self, asker: str) -> None:
        """Refuse a connection: no process listens on this host."""
        if self.loud and self.cluster.net.linked(asker, self.name):
            self.cluster.hear_closed(self.cluster.agents[asker], self.name)

    def heartbeat(self) -> None:
        """Send a heartbeat to every agent of the job."""
        agents = self.cluster.agents if self.cluster.bare else {*self.state.nodes, *self.mind.configuration.voters}
        self.send_configurations({*agents, *self.members}, self.mind.configurations)

    def send_configurations(self, others: Iterable[str], configurations: tuple[el.Configuration, ...]) -> None:
        sent_at, lease_from = self.now, quorum.lease_from(self.mind, self.now)
        for other in sorted(others):
            if other != self.name:
                heard = el.HeardFromLeader(configurations, sent_at, self.answered.get(other), lease_from)
                self.send(other, lambda a, heard=heard: a.hear_configurations(self.name, heard))

    def hear_configurations(self, leader: str, heard: el.HeardFromLeader) -> None:
        if not self.alive or self.fenced:
            return
        self.think(heard)
        term, known = heard.configurations[-1].term, self.mind.configuration.number
        if not election.follows(self.mind, term) or self.mind.configuration.leader != leader:
            return
        self.send(leader, lambda a: a.hear_answer(el.HeardFromAgent(self.name, term, heard.sent_at, known)))
        self.resync(leader, term)

    def hear_answer(self, heard: el.HeardFromAgent) -> None:
        """Handle the answer of an agent that follows this leader. The last leader admitted it, if it is new here."""
        if not self.alive or self.fenced:
            return
        if self.leads(heard.term):
            if not self.admits(heard.agent):
                return
            self.answered[heard.agent] = max(heard.sent_at, self.answered.get(heard.agent, heard.sent_at))
        self.think(heard)

    def leads(self, term: int) -> bool:
        return self.mind.role is el.ElectionRole.LEADER and term == self.mind.term

    def admits(self, name: str) -> bool:
        """Admit an agent of the last leader, unless it was given up."""
        if name in self.members or name == self.name:
            return True
        if not self.cluster.bare and name in self.state.failure_domains and name not in self.state.nodes:
            evicted = el.Evicted(self.mind.term, "it was given up")
            self.send(name, lambda a: a.think(evicted))
            return False
        self.members.add(name)
        self.think(el.AgentsJoined({name: ""}))
        if self.deciding and not self.cluster.bare and name not in self.state.failure_domains:
            self.decide(ev.NodeJoined(name, self.cluster.place(name)))
        return True

    def resync(self, leader: str, term: int) -> None:
        """Send the node's inventory to the leader, once per leader."""
        if self.resynced < term:
            self.resynced = term
            workers = tuple(self.found.values())
            *earlier, last = self.discards or [(0, -1)]
            ranks = self.cluster.storage.nodes[self.name].ranks()
            told = ev.NodeResynced(self.name, workers, last, ranks, earlier=tuple(earlier))
            self.send(leader, lambda a: a.told(told, term))

    def keep_beating(self) -> None:
        if self.alive and self.mind.role is el.ElectionRole.LEADER:
            if quorum.speaks(self.mind, self.now):
                self.heartbeat()
            self.cluster.clock.after(HEARTBEAT_S, self.keep_beating)

    def fence(self, reason: str) -> None:
        self.fenced_why = reason
        self.deciding = False
        for worker in self.cluster.on(self.name):
            self.cluster.clock.after(self.cluster.rng.uniform(0.0, 0.2 * T), worker.vanish)
        self.cluster.clock.after(0.25 * T, lambda: self.cluster.closed(self.name))
        lives = sum(other.split("~")[0] == self.name.split("~")[0] for other in self.cluster.agents)
        again = f"{self.name.split('~')[0]}~{lives}"
        self.cluster.clock.after(self.cluster.rng.uniform(0.3, 3.0) * T, lambda: self.cluster.join(again))

    # --- the coordinator -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        self.deciding = True
        self.keep_beating()
        self.cluster.leadership(self)
        self.decide(ev.JobSubmitted(self.name, self.cluster.place(self.name)))
        self.watch_commit()

    def take_over(self) -> None:
        for now, event in () if self.cluster.bare else self.log:
            coordinator.step(self.cluster.settings, self.state, event, now)
        last = self.log[-1][0] if self.log else 0.0
        self.origin = rebased(self.now, last, self.log_heard_at) - self.now
        self.log_term = self.mind.term
        self.cluster.leadership(self)
        self.deciding = True
        self.keep_beating()
        self.decide(ev.CoordinatorMoved(self.mind.term, self.name))
        self.share_log()
        self.resync(self.name, self.mind.term)
        early, self.early = self.early, []
        for event in early:
            self.told(event, self.mind.term)
        self.watch_commit()

    def told(self, event: ev.Event, term: int) -> None:
        """Handle the report of an agent that follows this one as the leader of the term."""
        if self.decides() and term == self.mind.term:
            if not isinstance(event, ev.NodeResynced) or self.admits(event.node):
                self.decide(event)
        elif self.mind.candidate_term == term:
            self.early.append(event)

    def decide(self, event: ev.Event) -> None:
        """Decide on an event; on the reports of ranks a moment later, all that have come together."""
        if not isinstance(event, ev.RankReport):
            self.decide_reports()
            self.decide_now(event)
        elif self.decides():
            if not self.reports:
                self.cluster.clock.after(self.cluster.rng.choice((0.0, 0.002)), self.decide_reports)
            self.reports.append(event)

    def decide_reports(self) -> None:
        reports, self.reports = tuple(self.reports), []
        if reports:
            self.decide_now(reports[0] if len(reports) == 1 else ev.RanksReported(reports))

    def decide_now(self, event: ev.Event) -> None:
        if not self.decides() or self.cluster.stopped is not None:
            return
        if self.held_at is not None or not quorum.holds_lease(self.mind, self.now):
            self.waiting.append(event)
            return
        epoch, now = self.state.epoch, self.now + self.origin
        if self.cluster.bare:
            self.write(now, event)
            return
        if self.log and now < self.log[-1][0]:
            assert math.isclose(now, self.log[-1][0]), f"time fell from {self.log[-1][0]:.3f} to {now:.3f}"
            now = self.log[-1][0]  # a rounding error of a sum
        effects = coordinator.step(self.cluster.settings, self.state, event, now)
        self.cluster.note(f"  {self.name} t{self.mind.term} {now:.3f} {event}")
        for effect in effects:
            self.cluster.note(f"             -> {effect}")
        check_invariants(self.cluster.settings, self.state)
        assert self.state.epoch >= epoch, "an epoch fell"
        self.cluster.check_epoch(self)
        self.write(now, event)
        for effect in effects:
            self.perform(effect)
        self.arm()

    def log_followers(self) -> list[str]:
        return [voter for voter in self.mind.configuration.voters if voter != self.name]

    def write(self, now: float, event: ev.Event) -> None:
        self.log.append((now, event))
        self.log_heard_at = self.now
        for log_follower in self.log_followers():
            self.send_entry(log_follower, len(self.log) - 1, now, event)
        self.think(el.LogFollowed(el.LogIndex(self.mind.term, len(self.log))))

    def send_entry(self, log_follower: str, index: int, now: float, event: ev.Event) -> None:
        term = self.mind.term
        delay = self.cluster.rng.uniform(0.0, self.cluster.log_delay_s)
        follow = lambda a: a.follow(term, index, now, event)  # noqa: E731
        self.cluster.clock.after(delay, lambda: self.send(log_follower, follow))

    def share_log(self) -> None:
        """Send the whole log to all log followers."""
        term, entries = self.mind.term, list(self.log)
        for log_follower in self.log_followers():
            self.send(log_follower, lambda a: a.follow_all(term, entries))

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
            case do.ReleaseNode():
                self.cluster.release(effect.node)
            case do.BeginGeneration() | do.SetBuddies() | do.DiscardAbove():
                epoch = self.state.epoch
                if isinstance(effect, do.SetBuddies):
                    self.cluster.storage.keep[key] = kept(self.state)
                for other in self.state.nodes:
                    self.order(other, effect, term, key, epoch)
            case do.StartWorker() | do.ReportReplicas():
                self.order(effect.node, effect, term, key, self.state.epoch)
            case _:
                if isinstance(effect, do.AssignRank):
                    self.cluster.check_assignment(self, effect)
                if isinstance(effect, do.AttachGroups):
                    self.cluster.check_all_restored(self, effect)
                relocation = self.state.relocation
                if isinstance(effect, do.AbortStep) and relocation and relocation.moves_in == effect.epoch:
                    self.cluster.moves.add(effect.epoch)
                if isinstance(effect, do.KillWorker):
                    self.cluster.check_not_stuck(self, effect)
                node = self.cluster.workers_node(effect.worker, self.state)
                self.order(node, effect, term, key, self.state.epoch)

    def order(self, node: str, effect: do.Effect, term: int, key: tuple[int, int, int], epoch: int) -> None:
        self.send(node, lambda a: a.obey(effect, term, key, epoch))

    def watch_commit(self) -> None:
        storage = self.cluster.storage
        if self.decides() and self.cluster.stopped is None and not self.cluster.bare:
            awaited = not self.state.committed or self.state.closed != self.state.released
            if self.state.buddies and awaited and storage.is_protected() and not self.state.move:
                self.decide(ev.SnapshotCommitted(storage.committed(), self.state.epoch))
            self.cluster.clock.after(0.05, self.watch_commit)
