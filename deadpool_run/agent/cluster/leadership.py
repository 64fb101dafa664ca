"""Shell of the election: its one timer, its connections, and what this agent does about each output."""

import asyncio
import math
import random
from collections.abc import Callable, Iterable
from typing import Protocol, assert_never

from deadpool_run.agent.authority.claimant import Claimant
from deadpool_run.agent.cluster.vote_links import VoteLinks
from deadpool_run.agent.node.node import LocalNode
from deadpool_run.agent.spec import Cluster
from deadpool_run.agent.tasks import Tasks
from deadpool_run.core.leadership import election, electorate, quorum
from deadpool_run.core.leadership.electorate import Agent, Configuration, ElectionRole, Event, HeardFromAgent, Output
from deadpool_run.ids import NodeId
from deadpool_run.wire import peers
from deadpool_run.wire.auth import Credentials
from deadpool_run.wire.peers import Peer

_CLAIMS = 256
"""The most agents that the leader tells itself."""
LOOKS = 20
"""How often a leader handles answers within a node timeout. They count from the time of the request, so late is fine."""


class LeadershipOwner(Protocol):
    """Acts on the outcome of elections."""

    @property
    def node(self) -> LocalNode:
        """This node."""

    def take_over(self, term: int) -> None:
        """Become the leader."""

    def share(self, agents: peers.Agents) -> None:
        """Send every node the configuration."""

    def lose_node(self, node: NodeId, reason: str) -> None:
        """Report to the coordinator that a node failed."""

    def follow(self, leader: Peer, term: int) -> None:
        """Follow another leader."""

    def lease_changed(self, *, regained: bool) -> None:
        """Decide again, since nobody else was elected; or nothing for now, since this leader's lease has run out."""

    def fence(self, reason: str) -> None:
        """End this node's workers, and leave the job."""


class Leadership:
    """This node's part in elections, in the running loop. The configurations have the addresses of the others."""

    def __init__(
        self,
        agent: Agent,
        known: Iterable[Peer],
        owner: LeadershipOwner,
        cluster: Cluster,
        credentials: Credentials,
    ) -> None:
        """`known` are agents' addresses, this one's among them."""
        self.agent, self._lease_until = agent, _lease_until(agent)
        """To read, never to change: what this agent knows, and until when it holds a lease."""
        self._addresses = {peer.node: peer for peer in known}
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._answer: Callable[[peers.Message], None] | None = None
        self._closed = False
        self._suspended_late = False
        self._answers: list[HeardFromAgent] = []
        self._answers_due: asyncio.Handle | None = None
        self._log: electorate.LogIndex | None = None
        self.vote_links = VoteLinks(
            credentials,
            agent.timeout_s,
            self._on_message,
            lambda node: self.handle(electorate.AgentRefused(node)),
        )
        self._claimant: Claimant | None = None
        if cluster.authority is not None:
            alone = "neither of the two machines may continue without the other"
            self._claimant = Claimant(cluster.authority, self._addresses[agent.me], alone)
        self._asking: set[tuple[int, bool]] = set()
        """Claims, and whether they are pre-votes, that the authority has not answered."""
        self._tasks = Tasks()
        owner.node.voters_are(self.others())
        self._set_timer()

    def holds_lease(self) -> bool:
        """Return whether this agent leads, and nobody else can have been elected.

        If its lease has run out, that is noted now, not when its timer comes: after a pause of the machine messages are
        read before timers run.
        """
        if self._loop.time() < self._lease_until:
            return True
        if self.agent.role is ElectionRole.LEADER:
            self.handle(electorate.Tick())
        return quorum.holds_lease(self.agent, self._loop.time())

    def catch_up(self) -> None:
        """Do what is due: after a pause of the machine messages are read before timers run."""
        if self._timer is not None and self._loop.time() >= self._timer.when():
            self.handle(electorate.Tick())

    def has_followers(self) -> bool:
        """Return whether any other node may follow this leader."""
        return not self.agent.ruled_out.issuperset(self.agent.answered_at)

    @property
    def leader(self) -> Peer | None:
        """The leader's address, as far as it is known here."""
        return self._addresses.get(self.agent.configuration.leader)

    def others(self) -> list[Peer]:
        """Return the other voters whose addresses are known."""
        return self._peers(self.agent.configuration.voters)

    def know(self, peer: Peer) -> None:
        """Record an agent's address."""
        self._addresses[peer.node] = peer

    def handle(self, event: Event) -> None:
        """Handle a fact, after all answers and entries that have come."""
        self._handle_log()
        if self._answers:
            self._handle_answers()
        self._handle(event)

    def suspend_if_due(self) -> None:
        """Stop the workers if the loop is too late to do so; another thread calls this while the loop is blocked."""
        due = self._loop.time() >= quorum.suspend_at(self.agent)
        if due and not (self._closed or self.agent.suspended or self._suspended_late):
            self._suspended_late = True
            self._owner.node.workforce.suspend()
            self._loop.call_soon_threadsafe(self._catch_up_late)

    def _catch_up_late(self) -> None:
        self._suspended_late = False
        self.handle(electorate.Tick())
        if not (self._closed or self.agent.suspended):
            self._owner.node.workforce.resume()

    def answered(self, answer: HeardFromAgent) -> None:
        """Handle an agent's answer. A leader gets one of each agent for each heartbeat, so it handles many together."""
        self._answers.append(answer)
        if self.agent.role is not ElectionRole.LEADER:
            self._handle_answers()
        elif self._answers_due is None:
            # The sooner a majority knows the last change of the configuration, the sooner the older one stops counting.
            delay_s = self.agent.timeout_s / LOOKS if len(self.agent.configurations) == 1 else 0.0
            self._answers_due = self._loop.call_later(delay_s, self._handle_answers)

    def _handle_answers(self) -> None:
        if self._answers_due is not None:
            self._answers_due.cancel()
            self._answers_due = None
        answers, self._answers = tuple(self._answers), []
        self._handle(electorate.HeardFromAgents(answers))

    def _handle(self, event: Event) -> None:
        if self._closed:
            return
        before = self.agent
        after, outputs = election.step(self.agent, event, self._loop.time())
        self.agent, self._lease_until = after, _lease_until(after)
        if _decides(before) and not _decides(after):
            self._owner.lease_changed(regained=False)
        if after.configuration.voters != before.configuration.voters:
            self._owner.node.voters_are(self.others())
        for output in outputs:
            self._act(output)
        if _decides(after) and not _decides(before) and after.term == before.term:
            self._owner.lease_changed(regained=True)
        leader = self._addresses.get(after.configuration.leader)
        if after.role is ElectionRole.FOLLOWER and after.term > before.term and leader is not None:
            self._owner.follow(leader, after.term)
        self._set_timer()

    def handle_configurations(self, agents: peers.Agents, sent_at: float | None = None) -> None:
        """Handle configurations that a leader, or an agent that is elected, has sent: to be answered if `sent_at` is given."""
        for peer in agents.peers:
            self.know(peer)
        self.handle(electorate.HeardFromLeader(agents.configurations, sent_at))

    def handle_heartbeat(self, heartbeat: peers.Heartbeat) -> None:
        """Handle a heartbeat of the leader, which names the configurations that still count."""
        counting = tuple(each for each in self.agent.configurations if each.number >= heartbeat.oldest)
        if counting and counting[-1].index == (heartbeat.term, heartbeat.newest):
            heard = electorate.HeardFromLeader(counting, heartbeat.sent_at, heartbeat.answered, heartbeat.lease_from)
            self.handle(heard)

    def agents(self) -> peers.Agents:
        """Return the configurations that count, with addresses."""
        return self._with_addresses(self.agent.configurations)

    def heartbeat(self) -> peers.Heartbeat | None:
        """Return this leader's heartbeat to a node of which it has no answer yet; None if it is to be silent."""
        now = self._loop.time()
        if not quorum.speaks(self.agent, now):
            return None
        oldest, newest = self.agent.configurations[0].number, self.agent.configurations[-1].number
        lease_from = quorum.lease_from(self.agent, now)
        return peers.Heartbeat(self.agent.term, now, oldest, newest, lease_from=lease_from)

    def claim(self, others: Iterable[NodeId]) -> None:
        """Tell agents that are not connected that this one leads. Of very many it tells some, each of which tells others.

        Some may not do so: the next time they are others.
        """
        receivers, agents = self._peers(others), self.agents()
        random.shuffle(receivers)
        size = 1 if len(receivers) <= _CLAIMS else math.isqrt(len(receivers))
        for first in range(0, len(receivers), size):
            claim = peers.LeadershipClaim(self._loop.time(), agents, tuple(receivers[first + 1 : first + size]))
            self.vote_links.send(receivers[first : first + 1], claim)

    def know_log(self, log: electorate.LogIndex) -> None:
        """Note the newest entry that is known here: before the next event, and once for all entries of a turn of the loop."""
        if self._log is None:
            self._loop.call_soon(self._handle_log)
        self._log = log

    def _handle_log(self) -> None:
        if self._log is not None:
            log, self._log = self._log, None
            self._handle(electorate.LogFollowed(log))

    def suspect(self, node: NodeId) -> None:
        """Find out whether the host of an agent whose connection was closed refuses another."""
        self.vote_links.probe(self._peers([node]))

    def close(self) -> None:
        """Take no part any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._answers_due is not None:
            self._answers_due.cancel()
        self.vote_links.close()
        self._tasks.cancel()

    def _act(self, output: Output) -> None:  # noqa: C901 - one case for each output
        match output:
            case electorate.RequestVotes(asked, voters):
                self.vote_links.send(self._peers(voters), asked)
            case electorate.AskAuthority(term, pre_vote):
                self._tasks.start(self._ask_authority(term, pre_vote=pre_vote))
            case electorate.GiveVote(_, vote):
                if self._answer is not None:
                    self._answer(vote)
            case electorate.ClaimLeadership(configurations):
                agents = self._with_addresses(configurations)
                claim = peers.LeadershipClaim(self._loop.time(), agents)
                self.vote_links.send(self._peers(peer.node for peer in agents.peers), claim)
            case electorate.TakeOver(configuration):
                self._owner.take_over(configuration.term)
            case electorate.ShareConfiguration(configurations):
                self._owner.share(self._with_addresses(configurations))
            case electorate.SuspendWorkers():
                self._owner.node.suspend()
            case electorate.ResumeWorkers():
                self._owner.node.resume()
            case electorate.LoseNode(node, reason):
                self._owner.lose_node(node, reason)
            case electorate.Fence(reason):
                self._owner.fence(reason)
            case _:
                assert_never(output)

    async def _ask_authority(self, term: int, *, pre_vote: bool) -> None:
        assert self._claimant is not None
        if (term, pre_vote) in self._asking:
            return
        self._asking.add((term, pre_vote))
        try:
            granted = await self._claimant.claim(term, pre_vote=pre_vote)
        finally:
            self._asking.discard((term, pre_vote))
        if granted is not None:  # else the election asks again
            self.handle(electorate.AuthorityAnswered(term, pre_vote, granted))

    def _on_message(self, message: peers.Message, answer: Callable[[peers.Message], None]) -> None:
        """Handle a message of another agent on a vote connection."""
        self._answer = answer
        match message:
            case electorate.VoteAsked() | electorate.VoteGiven() | electorate.AgentEnded():
                self.handle(message)
            case peers.LeadershipClaim(sent_at, agents, relay):
                self.vote_links.send(relay, peers.LeadershipClaim(sent_at, agents))
                self.handle_configurations(agents, sent_at)
                term = agents.configurations[-1].term
                if election.follows(self.agent, term):
                    known = self.agent.configuration.number
                    answer(peers.HeartbeatAck(term, sent_at, known, node=self.agent.me))
            case peers.HeartbeatAck(term, sent_at, configuration, node=node) if node:
                self.answered(HeardFromAgent(NodeId(node), term, sent_at, configuration))
            case _:
                pass  # no message for a vote connection
        self._answer = None

    def _peers(self, nodes: Iterable[NodeId]) -> list[Peer]:
        found = (self._addresses.get(node) for node in nodes if node != self.agent.me)
        return [peer for peer in found if peer is not None]

    def _with_addresses(self, configurations: tuple[Configuration, ...]) -> peers.Agents:
        voters = dict.fromkeys(voter for each in configurations for voter in each.voters)
        return peers.Agents(configurations, tuple(self._addresses[each] for each in voters if each in self._addresses))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = None if self._closed else election.next_deadline(self.agent)
        self._timer = None if deadline is None else self._loop.call_at(deadline, self.handle, electorate.Tick())


def _lease_until(agent: Agent) -> float:
    return quorum.lease_until(agent) if agent.role is ElectionRole.LEADER else electorate.NEVER


def _decides(agent: Agent) -> bool:
    return agent.role is ElectionRole.LEADER and agent.lapsed_at is None
