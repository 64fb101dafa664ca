"""Shell of the election: its one timer, its connections, and what this agent does about each output."""

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, assert_never

from deadpool_run.agent.cluster.vote_links import VoteLinks
from deadpool_run.core.leadership import election, electorate
from deadpool_run.core.leadership.electorate import Agent, Configuration, ElectionRole, Event, HeardFromAgent, Output
from deadpool_run.ids import NodeId
from deadpool_run.wire import peers
from deadpool_run.wire.peers import Peer

LOOKS = 20
"""How often a leader handles answers within a node timeout. They count from the time of the request, so late is fine."""


class LeadershipOwner(Protocol):
    """Acts on the outcome of elections."""

    def take_over(self, term: int) -> None:
        """Become the leader."""

    def share(self, agents: peers.Agents) -> None:
        """Send every node the configuration."""

    def lose_node(self, node: NodeId, reason: str) -> None:
        """Report to the coordinator that a node failed."""

    def follow(self, leader: Peer, term: int) -> None:
        """Follow another leader."""

    def fence(self, reason: str) -> None:
        """End this node's workers, and leave the job."""


class Leadership:
    """This node's part in elections, in the running loop. The configurations have the addresses of the others."""

    def __init__(
        self,
        agent: Agent,
        addresses: Mapping[NodeId, Peer],
        owner: LeadershipOwner,
        token: bytes,
    ) -> None:
        self._agent = agent
        self._addresses = dict(addresses)
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._answer: Callable[[peers.Message], None] | None = None
        self._closed = False
        self._answers: list[HeardFromAgent] = []
        self._answers_due: asyncio.Handle | None = None
        self.vote_links = VoteLinks(
            token,
            agent.timeout_s,
            self._on_message,
            lambda node: self.handle(electorate.AgentEnded(node)),
        )
        self._set_timer()

    @property
    def agent(self) -> Agent:
        """To read, never to change."""
        return self._agent

    def has_authority(self) -> bool:
        """Return whether this agent leads. If its authority has run out, it is fenced now, not when its timer comes.

        After a pause of the machine, messages are read before timers run.
        """
        if self._agent.role is ElectionRole.LEADER and not election.has_leadership(self._agent, self._loop.time()):
            self.handle(electorate.Tick())
        return self._agent.role is ElectionRole.LEADER

    @property
    def leader(self) -> Peer | None:
        """The leader's address, as far as it is known here."""
        return self._addresses.get(self._agent.configuration.leader)

    def others(self) -> list[Peer]:
        """Return the other agents of the configuration whose addresses are known."""
        return [peer for peer in self._others(self._agent.configuration) if peer.port]

    def know(self, peer: Peer) -> None:
        """Record an agent's address."""
        self._addresses[peer.node] = peer

    def handle(self, event: Event) -> None:
        """Handle a fact, after all answers that have come."""
        if self._answers:
            self._handle_answers()
        self._handle(event)

    def answered(self, answer: HeardFromAgent) -> None:
        """Handle an agent's answer. A leader gets one of each agent for each heartbeat, so it handles many together."""
        self._answers.append(answer)
        if self._agent.role is not ElectionRole.LEADER:
            self._handle_answers()
        elif self._answers_due is None:
            # The sooner a majority knows the last change of the configuration, the sooner the older one stops counting.
            delay_s = self._agent.timeout_s / LOOKS if len(self._agent.configurations) == 1 else 0.0
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
        before = self._agent
        self._agent, outputs = election.step(self._agent, event, self._loop.time())
        for output in outputs:
            self._act(output)
        after = self._agent
        if (
            after.role is ElectionRole.FOLLOWER
            and after.term > before.term
            and after.configuration.leader in self._addresses
        ):
            self._owner.follow(self._addresses[after.configuration.leader], after.term)
        self._set_timer()

    def handle_configuration(self, agents: peers.Agents, *, claim: bool = False) -> None:
        """Handle a leader's configuration."""
        self.handle(electorate.HeardFromLeader(agents.term, self._learn(agents), claim))

    def handle_claim(self, agents: peers.Agents) -> None:
        """Handle a claim of leadership, which the elected agent or another one sent. It may not decide yet."""
        self.handle_configuration(agents, claim=True)

    def handle_heartbeat(self, heartbeat: peers.Heartbeat) -> None:
        """Handle a heartbeat of the leader, which names the configurations that still count."""
        configurations = tuple(
            configuration for configuration in self._agent.configurations if configuration.number >= heartbeat.oldest
        )
        if configurations and configurations[-1].number == heartbeat.newest:
            self.handle(electorate.HeardFromLeader(heartbeat.term, configurations))

    def agents(self) -> peers.Agents:
        """Return the configurations that count, with addresses."""
        return self._with_addresses(self._agent.term, self._agent.configurations)

    def heartbeat(self) -> peers.Heartbeat:
        """Return this leader's heartbeat."""
        configurations = self._agent.configurations
        return peers.Heartbeat(self._agent.term, self._loop.time(), configurations[0].number, configurations[-1].number)

    def claim(self, but: Collection[NodeId]) -> None:
        """Send a claim of leadership to agents of the configuration that are not connected."""
        message = peers.LeadershipClaim(self._loop.time(), self.agents())
        self.vote_links.send(
            [peer for peer in self._others(self._agent.configuration) if peer.node not in but], message
        )

    def close(self) -> None:
        """Take no part any more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._answers_due is not None:
            self._answers_due.cancel()
        self.vote_links.close()

    def _act(self, output: Output) -> None:
        match output:
            case electorate.RequestVotes(asked):
                log = asked.log
                ask = peers.VoteRequest(asked.term, asked.candidate, log.term, log.entries, asked.configuration)
                self.vote_links.send(self._others(self._agent.configuration), ask)
            case electorate.GiveVote(_, vote):
                if self._answer is not None:
                    configurations = self._with_addresses(vote.term, vote.configurations).configurations
                    self._answer(
                        peers.Vote(vote.term, vote.voter, vote.granted, vote.closed, vote.voted_term, configurations)
                    )
            case electorate.ClaimLeadership(term, configurations):
                self.vote_links.send(
                    self._others(configurations[-1]),
                    peers.LeadershipClaim(self._loop.time(), self._with_addresses(term, configurations)),
                )
            case electorate.TakeOver(term):
                self._owner.take_over(term)
            case electorate.ShareConfiguration(configurations):
                self._owner.share(self._with_addresses(self._agent.term, configurations))
            case electorate.LoseNode(node, reason):
                self._owner.lose_node(node, reason)
            case electorate.Fence(reason):
                self._owner.fence(reason)
            case _:
                assert_never(output)

    def _on_message(self, message: peers.Message, answer: Callable[[peers.Message], None]) -> None:
        """Handle a message of another agent on a vote connection."""
        self._answer = answer
        match message:
            case peers.VoteRequest(term, candidate, log_term, log_entries, configuration):
                log = electorate.LogIndex(log_term, log_entries)
                self.handle(electorate.VoteAsked(term, candidate, log, configuration))
            case peers.Vote(term, voter, granted, closed, voted_term, configurations):
                learned = self._learn(peers.Agents(term, configurations))
                self.handle(electorate.VoteGiven(term, voter, granted, closed, voted_term, learned))
                if self._agent.role is ElectionRole.LEADER:  # this vote came after the majority's
                    answer(peers.LeadershipClaim(self._loop.time(), self.agents()))
            case peers.LeadershipClaim(sent_at, agents):
                self.handle_claim(agents)
                if self._agent.term == agents.term:
                    answer(
                        peers.HeartbeatAck(agents.term, sent_at, self._agent.configuration.number, node=self._agent.me)
                    )
            case peers.HeartbeatAck(term, sent_at, configuration, node=node) if node:
                self.answered(HeardFromAgent(NodeId(node), term, sent_at, configuration))
            case _:
                pass  # no message for a vote connection
        self._answer = None

    def _learn(self, agents: peers.Agents) -> tuple[Configuration, ...]:
        """Record the agents' addresses; return the configurations without them."""
        for configuration in agents.configurations:
            for peer in configuration.agents:
                if peer.port:  # else the sender does not know it
                    self.know(peer)
        return configurations_of(agents)

    def _others(self, configuration: Configuration) -> list[Peer]:
        found = (self._addresses.get(node) for node in configuration.agents if node != self._agent.me)
        return [peer for peer in found if peer is not None]

    def _with_addresses(self, term: int, configurations: tuple[Configuration, ...]) -> peers.Agents:
        def listed(configuration: Configuration) -> peers.ConfigurationMessage:
            known = (self._addresses.get(node, Peer(node, "", 0)) for node in configuration.agents)
            return peers.ConfigurationMessage(configuration.number, configuration.leader, tuple(known))

        return peers.Agents(term, tuple(map(listed, configurations)))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = None if self._closed else election.next_deadline(self._agent)
        self._timer = None if deadline is None else self._loop.call_at(deadline, self.handle, electorate.Tick())


def configurations_of(agents: peers.Agents) -> tuple[Configuration, ...]:
    """Return the configurations without the addresses."""
    return tuple(
        Configuration(configuration.number, configuration.leader, tuple(peer.node for peer in configuration.agents))
        for configuration in agents.configurations
    )
