"""Model of some machines, their clocks and their links. Each agent is the real `election.step`.

A schedule is what happens by itself (`World.run_one`: the oldest message arrives, else the next timer fires) and the faults in
between (`World.apply`). `World` raises `Broken` when one of the invariants A to D and G does not hold; see `_check`.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

from deadpool_run.core.leadership import election, quorum
from deadpool_run.core.leadership import electorate as el
from deadpool_run.ids import NodeId

T = 80.0
"""The node timeout. All parts of it that the election uses are whole numbers, so that equal states compare equal."""
BEAT = T / 5
ROLE = el.ElectionRole
AUTHORITY = NodeId("authority")
"""The external one, at the end of links to all machines."""
Link = tuple[NodeId, NodeId, str]
Fault = tuple[Any, ...]


class Broken(AssertionError):  # noqa: N818 - an invariant is broken
    """An invariant does not hold."""


class Host(NamedTuple):
    """One machine: its agent, and what its shell knows."""

    agent: el.Agent
    behind: float = 0.0
    """How far its clock is behind, since it stood still."""
    wakes_at: float | None = None
    frozen_at: float | None = None
    """Since when its clock stands still."""
    dead: bool = False
    beat_at: float = el.FOREVER
    """When it sends heartbeats, by its own clock."""
    due: float | None = None
    """When its agent's timer fires, by its own clock."""
    lost: frozenset[NodeId] = frozenset()
    """Nodes that it gave up."""
    skewed: bool = False
    """Its clock stood still once: nothing is promised about its lease and its workers."""


class World:
    """All machines and everything that is under way. Methods change it in place."""

    __slots__ = (
        "bad", "claims", "committed", "excused", "granted", "hosts", "links", "now", "parents", "refusals", "sent", "steps",
        "terms", "trace", "votes",
    )  # fmt: skip

    def __init__(self, *, claims: bool = False) -> None:
        self.now = 0.0
        self.claims = claims
        """Whether there is an external authority."""
        self.granted: tuple[int, NodeId] | None = None
        """The newest term that it has granted, and to which machine."""
        self.hosts: dict[NodeId, Host] = {}
        self.links: dict[Link, tuple[tuple[int, Any], ...]] = {}
        self.bad: tuple[tuple[float, str, NodeId, NodeId], ...] = ()
        """Links that hold messages back or lose them, each until a time."""
        self.sent = self.steps = self.refusals = 0
        self.excused = False
        """A host refused a connection while two agents voted. Two may lead then."""
        self.trace: tuple[Any, ...] = ()
        # for the invariants
        self.terms: dict[int, NodeId] = {}
        self.committed: frozenset[tuple[int, int]] = frozenset()
        self.parents: dict[tuple[int, int], tuple[int, int]] = {}
        self.votes: tuple[tuple[int, NodeId, tuple[int, int], el.LogIndex], ...] = ()

    def copy(self) -> "World":
        """Return a world that changes on its own."""
        other = object.__new__(World)
        for name in World.__slots__:
            value = getattr(self, name)
            setattr(other, name, value.copy() if isinstance(value, dict) else value)
        return other

    # --- what happens by itself

    def local(self, node: NodeId) -> float:
        """Return the time on this machine's clock."""
        host = self.hosts[node]
        return (self.now if host.frozen_at is None else host.frozen_at) - host.behind

    def lives(self, node: NodeId) -> bool:
        """Tell whether the agent takes part."""
        host = self.hosts[node]
        return not host.dead and host.agent.role is not ROLE.FENCED

    def heads(self) -> Iterator[tuple[int, Link]]:
        """Yield the links whose oldest message can arrive now."""
        stalled = {(source, to) for _, kind, source, to in self.bad if kind == "hold"}
        for link, queue in self.links.items():
            if (link[0], link[1]) not in stalled and (link[1] == AUTHORITY or self.hosts[link[1]].wakes_at is None):
                yield queue[0][0], link

    def run_one(self) -> None:
        """Let the oldest message arrive; without one, let the next timer fire."""
        first = min(self.heads(), default=None)
        if first is None:
            self.wait()
        else:
            self.deliver(first[1])

    def run(self, until: float) -> None:
        """Let everything happen by itself for a while."""
        while any(True for _ in self.heads()) or self.next_at() <= until:
            self.run_one()
        self.now = until

    def next_at(self) -> float:
        """Return when the next timer fires."""
        return max(min(self._timers(), default=(el.FOREVER, "", ""))[0], self.now)

    def wait(self) -> None:
        """Let the next timer fire, or the next fault end, although messages may be under way."""
        at, what, node = min(self._timers())
        self.steps += 1
        self.now = max(self.now, at)
        if what == "link":
            self.bad = tuple(each for each in self.bad if each[0] > self.now)
        elif what == "wake":
            host = self.hosts[node]
            behind = host.behind if host.frozen_at is None else host.behind + self.now - host.frozen_at
            self.hosts[node] = host._replace(wakes_at=None, frozen_at=None, behind=behind)
        elif what == "beat":
            self._beat(node)
        else:
            assert self.hosts[node].due <= self.local(node), "times are rounded: use whole numbers"
            self.handle(node, el.Tick())
            due = self.hosts[node].due
            if due is not None and due <= self.local(node):
                raise Broken(f"{node} has done nothing about what was due")

    def _timers(self) -> Iterator[tuple[float, str, NodeId]]:
        for until, *_ in self.bad:
            yield until, "link", NodeId("")
        for node, host in self.hosts.items():
            if not self.lives(node):
                continue
            if host.wakes_at is not None:
                yield host.wakes_at, "wake", node
                continue
            if host.due is not None:
                yield host.due + host.behind, "tick", node
            if host.agent.role is ROLE.LEADER:
                yield host.beat_at + host.behind, "beat", node

    def _beat(self, node: NodeId) -> None:
        host = self.hosts[node]
        now, agent = self.local(node), host.agent
        self.hosts[node] = host._replace(beat_at=now + BEAT)
        lease_from = quorum.lease_from(agent, now)
        for other in self.hosts:
            if other != node and other not in host.lost:  # a new leader's shell finds the other nodes in the log
                heard = el.HeardFromLeader(agent.configurations, now, agent.answers.get(other), lease_from)
                self.send(node, other, "control", ("beat", agent.term, heard, agent.log))

    # --- messages

    def send(self, source: NodeId, to: NodeId, kind: str, message: Any) -> None:
        """Put a message on a link."""
        if to != AUTHORITY and (to not in self.hosts or not self.lives(to)):
            return
        if self.bad and any(bad == "cut" and (source, to) == (a, b) for _, bad, a, b in self.bad):
            return
        self.sent += 1
        link = (source, to, kind)
        self.links[link] = (*self.links.get(link, ()), (self.sent, message))

    def deliver(self, link: Link) -> None:
        """Let the oldest message of this link arrive."""
        (_, message), *rest = self.links[link]
        if rest:
            self.links[link] = tuple(rest)
        else:
            del self.links[link]
        self.steps += 1
        source, to, _ = link
        if to == AUTHORITY:
            self._claim(source, message)
        elif self.lives(to):
            self._receive(source, to, message)

    def _claim(self, source: NodeId, asked: el.AskAuthority) -> None:
        """Let the authority answer: it grants each term once, and none below one that it has granted."""
        granted = self.granted is None or self.granted[0] < asked.term or self.granted == (asked.term, source)
        if granted and not asked.pre_vote:
            self.granted = (asked.term, source)
        self.send(AUTHORITY, source, "answers", el.AuthorityAnswered(asked.term, asked.pre_vote, granted))

    def _receive(self, source: NodeId, to: NodeId, message: Any) -> None:
        match message:
            case ("beat", term, heard, log):
                self.handle(to, heard)
                agent = self.hosts[to].agent
                if election.follows(agent, term):
                    if log > agent.log:
                        self.handle(to, el.LogFollowed(log))
                    answer = el.HeardFromAgent(to, term, heard.sent_at, agent.configuration.number)
                    self.send(to, source, "control", answer)
            case ("claim", term, configurations, sent_at):
                self.handle(to, el.HeardFromLeader(configurations, sent_at))
                agent = self.hosts[to].agent
                if agent.role is not ROLE.FENCED and agent.term == term == agent.voted_term:
                    self.send(to, source, "votes", el.HeardFromAgent(to, term, sent_at, agent.configuration.number))
            case ("share", configurations):
                self.handle(to, el.HeardFromLeader(configurations))
            case el.HeardFromAgent(agent=agent, term=term):
                host = self.hosts[to]
                if host.agent.role is ROLE.LEADER and term == host.agent.term:
                    if agent in host.lost:
                        self.send(to, agent, "control", el.Evicted(term, "it was given up"))
                    elif agent not in host.agent.answered_at:
                        self.handle(to, el.AgentsJoined({agent: ""}))
                self.handle(to, message)
            case _:
                self.handle(to, message)

    def handle(self, node: NodeId, event: el.Event) -> None:
        """Let an agent handle a fact, and do what it puts out."""
        host = self.hosts[node]
        now = self.local(node)
        agent, outputs = election.step(host.agent, event, now)
        self.hosts[node] = host._replace(agent=agent, due=election.next_deadline(agent))
        for output in outputs:
            self._act(node, output, now)
        if agent.role is ROLE.LEADER:
            self._check_authority()

    def _act(self, me: NodeId, output: el.Output, now: float) -> None:  # noqa: PLR0912 - one case for each output
        agent = self.hosts[me].agent
        match output:
            case el.RequestVotes(asked, voters):
                for voter in voters:
                    self.send(me, voter, "votes", asked)
            case el.AskAuthority():
                self.send(me, AUTHORITY, "questions", output)
            case el.GiveVote(candidate, vote):
                if vote.granted and not vote.pre_vote:
                    self.votes += ((vote.term, candidate, agent.configuration.index, agent.log),)
                self.send(me, candidate, "votes", vote)
            case el.ClaimLeadership(configurations):
                self._know(configurations)
                newest = configurations[-1]
                voting = {voter for each in configurations for voter in each.voters}
                for voter in sorted(voting - {me}):
                    self.send(me, voter, "votes", ("claim", newest.term, configurations, now))
            case el.ShareConfiguration(configurations):
                self._know(configurations)
                if len(configurations) == 1:
                    self.committed |= {configurations[0].index}
                for other in agent.answered_at:
                    self.send(me, other, "control", ("share", configurations))
            case el.TakeOver(configuration):
                self._check_takeover(me, agent, configuration)
                self.hosts[me] = self.hosts[me]._replace(beat_at=now, lost=frozenset())
            case el.LoseNode(node, _):
                self._check_loss(me, agent, node)
                self.hosts[me] = self.hosts[me]._replace(lost=self.hosts[me].lost | {node})
                self.send(me, node, "control", el.Evicted(agent.term, "it was given up"))
            case el.ResumeWorkers():
                self._check_resumption(me, agent)

    # --- invariants

    def _broken(self, why: str) -> None:
        if not self.excused:
            raise Broken(why)

    def _excuse(self, configurations: Iterable[el.Configuration]) -> None:
        self.excused |= not self.claims and self.refusals > 0 and any(len(each.voters) == 2 for each in configurations)

    def _check_authority(self) -> None:
        """A: at most one agent holds a lease."""
        has = [
            node
            for node, host in self.hosts.items()
            if not host.dead and not host.skewed and quorum.holds_lease(host.agent, self.local(node))
        ]
        if len(has) > 1:
            self._broken(f"A: {has} hold a lease at once")

    def _know(self, configurations: tuple[el.Configuration, ...]) -> None:
        self._excuse(configurations)
        for before, after in pairwise(configurations):
            self.parents.setdefault(after.index, before.index)

    def _check_takeover(self, me: NodeId, agent: el.Agent, configuration: el.Configuration) -> None:
        """B: one leader in a term. C: it knows what was decided. G: it knows as much as those who voted for it."""
        if self.terms.setdefault(configuration.term, me) != me:
            self._broken(f"B: {me} and {self.terms[configuration.term]} take over in term {configuration.term}")
        index: tuple[int, int] | None = configuration.index
        chain = set()
        while index is not None:
            chain.add(index)
            index = self.parents.get(index)
        if missed := {each for each in self.committed if each[0] < configuration.term} - chain:
            self._broken(f"C: {me} takes over in term {configuration.term} without {missed}, with {chain}")
        before = self.parents[configuration.index]
        for term, candidate, known, log in self.votes:
            if (term, candidate) == (configuration.term, me) and (before, agent.log) < (known, log):
                self._broken(f"G: {me} takes over with {before, agent.log}, and a voter knew {known, log}")
        self.committed |= {configuration.index}

    def _check_loss(self, me: NodeId, agent: el.Agent, node: NodeId) -> None:
        """D: the node's workers are stopped."""
        if me == node:
            raise Broken(f"D: {me} gives itself up")
        host = self.hosts[node]
        if host.skewed or self.hosts[me].skewed or not self.lives(node) or host.agent.term > agent.term:
            return
        due = quorum.governed_at(host.agent) + quorum.SUSPEND * T
        if not host.agent.suspended and self.local(node) < due:
            self._broken(f"D: {me} gives {node} up, whose workers run on until {due}")

    def _check_resumption(self, me: NodeId, agent: el.Agent) -> None:
        """D, later: nor do they go on before another leader counts on them."""
        if self.hosts[me].skewed:
            return
        for other, host in self.hosts.items():
            if me in host.lost and host.agent.role is ROLE.LEADER and host.agent.term >= agent.term and not host.skewed:
                self._broken(f"D: {me} resumes its workers after {other} gave it up")

    # --- faults

    def apply(self, fault: Fault) -> None:  # noqa: PLR0912 - one case for each kind
        """Let a fault happen."""
        if fault[0] != "join":
            self.trace = (*self.trace, (self.now / T, fault))
        match fault:
            case ("late",):
                self.wait()
            case ("swap", link):
                self.deliver(link)
            case (("hold" | "cut") as kind, pairs, long):
                self.bad += tuple((self.now + long, kind, source, to) for source, to in pairs)
                if kind == "cut":
                    self._drop(pairs)
            case ("reset", pairs):
                self._drop(pairs)
            case ("sleep", nodes, long):
                for node in nodes:
                    self.hosts[node] = self.hosts[node]._replace(wakes_at=self.now + long)
            case ("freeze", node, long):
                self.hosts[node] = self.hosts[node]._replace(wakes_at=self.now + long, frozen_at=self.now, skewed=True)
            case ("join", node, configurations, leader):
                agent = election.follower(node, T, configurations, self.now, claims=self.claims)
                self.hosts[node] = Host(agent, due=election.next_deadline(agent))
                self.handle(leader, el.AgentsJoined({node: ""}))
            case ("end", node, told):
                self.hosts[node] = self.hosts[node]._replace(dead=True)
                for other in told:
                    self.send(node, other, "control", el.AgentEnded(node))
            case ("refuse", by, to):
                self.refusals += 1
                self._excuse(each for host in self.hosts.values() for each in host.agent.configurations)
                self.handle(to, el.AgentRefused(by))
            case ("entry", node):
                host = self.hosts[node]
                agent = host.agent
                self.handle(node, el.LogFollowed(el.LogIndex(agent.term, agent.log.entries + 1)))
            case _:
                raise ValueError(fault)

    def _drop(self, pairs: Iterable[tuple[NodeId, NodeId]]) -> None:
        gone = set(pairs)
        self.links = {link: queue for link, queue in self.links.items() if (link[0], link[1]) not in gone}

    def heal(self) -> None:
        """End all faults."""
        self.bad = ()
        for node, host in self.hosts.items():
            if host.wakes_at is not None:
                behind = host.behind if host.frozen_at is None else host.behind + self.now - host.frozen_at
                self.hosts[node] = host._replace(wakes_at=None, frozen_at=None, behind=behind)

    # --- what the search asks

    def leaders(self) -> list[NodeId]:
        """Return which agents hold a lease."""
        return [
            node
            for node, host in self.hosts.items()
            if self.lives(node) and quorum.holds_lease(host.agent, self.local(node))
        ]
