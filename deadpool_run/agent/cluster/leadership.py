"""The shell of `core.election`: who decides for this job, as this agent knows it. One timer, no polling."""

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
"""At answers within a node time-out: what they say counts from when they were asked for, so nothing depends on it."""


class LeadershipOwner(Protocol):
    """What acts on what is found."""

    def take_over(self, term: int) -> None:
        """Decide from now on."""

    def share(self, agents: peers.Agents) -> None:
        """Tell every node who counts now."""

    def lose_node(self, node: NodeId, reason: str) -> None:
        """Tell the coordinator that a node is lost."""

    def follow(self, leader: Peer, term: int) -> None:
        """Obey another coordinator from now on."""

    def fence(self, reason: str) -> None:
        """End this node's workers, and leave the job."""


class Leadership:
    """One life of this node among the others, in the running loop. Where the others listen is known from the configurations."""

    def __init__(
        self,
        agent: Agent,
        addresses: Mapping[NodeId, Peer],
        body: LeadershipOwner,
        token: bytes,
    ) -> None:
        self._agent = agent
        self._addresses = dict(addresses)
        self._body = body
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._answer: Callable[[peers.Message], None] | None = None
        self._closed = False
        self._answers: list[HeardFromAgent] = []
        self._answers_due: asyncio.Handle | None = None
        self.vote_links = VoteLinks(
            token,
            agent.timeout_s,
            self._heard,
            lambda node: self.hear(electorate.AgentEnded(node)),
        )
        self._set_timer()

    @property
    def agent(self) -> Agent:
        """To read, never to change."""
        return self._agent

    @property
    def leader(self) -> Peer | None:
        """Who leads the job, as far as is known here, and where it listens."""
        return self._addresses.get(self._agent.configuration.leader)

    def others(self) -> list[Peer]:
        """Return the other agents that count, as far as it is known where they listen."""
        return [peer for peer in self._others(self._agent.configuration) if peer.port]

    def know(self, peer: Peer) -> None:
        """Note where an agent listens."""
        self._addresses[peer.node] = peer

    def hear(self, event: Event) -> None:
        """Take in a fact, behind all answers that have come."""
        if self._answers:
            self._hear_answers()
        self._hear(event)

    def answered(self, answer: HeardFromAgent) -> None:
        """Take in an agent's answer. A leader has one of each agent for each heartbeat, so it looks at many together."""
        self._answers.append(answer)
        if self._agent.role is not ElectionRole.LEADER:
            self._hear_answers()
        elif self._answers_due is None:
            # Who knows of the last change of the configuration is to be found soon, so that the older one counts no more.
            delay_s = self._agent.timeout_s / LOOKS if len(self._agent.configurations) == 1 else 0.0
            self._answers_due = self._loop.call_later(delay_s, self._hear_answers)

    def _hear_answers(self) -> None:
        if self._answers_due is not None:
            self._answers_due.cancel()
            self._answers_due = None
        answers, self._answers = tuple(self._answers), []
        self._hear(electorate.HeardFromAgents(answers))

    def _hear(self, event: Event) -> None:
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
            self._body.follow(self._addresses[after.configuration.leader], after.term)
        self._set_timer()

    def hear_configuration(self, told: peers.Agents, *, claim: bool = False) -> None:
        """Take in a leader's configuration."""
        self.hear(electorate.HeardFromLeader(told.term, self._learn(told), claim))

    def hear_claim(self, told: peers.Agents) -> None:
        """Take in that somebody is elected, who may not decide yet; another agent may have said so."""
        self.hear_configuration(told, claim=True)

    def hear_heartbeat(self, told: peers.Heartbeat) -> None:
        """Take in a sign of life of the leader, which says what still counts of the configurations that it told."""
        configurations = tuple(
            configuration for configuration in self._agent.configurations if configuration.number >= told.oldest
        )
        if configurations and configurations[-1].number == told.newest:
            self.hear(electorate.HeardFromLeader(told.term, configurations))

    def agents(self) -> peers.Agents:
        """Return the configurations that count, as they are told."""
        return self._told(self._agent.term, self._agent.configurations)

    def heartbeat(self) -> peers.Heartbeat:
        """Return a sign of life of this leader."""
        configurations = self._agent.configurations
        return peers.Heartbeat(self._agent.term, self._loop.time(), configurations[0].number, configurations[-1].number)

    def claim(self, but: Collection[NodeId]) -> None:
        """Have those of the configuration that are not connected follow this node, which leads."""
        message = peers.LeadershipClaim(self._loop.time(), self.agents())
        self.vote_links.say([peer for peer in self._others(self._agent.configuration) if peer.node not in but], message)

    def close(self) -> None:
        """Have no part in it any more."""
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
                self.vote_links.say(self._others(self._agent.configuration), ask)
            case electorate.GiveVote(_, vote):
                if self._answer is not None:
                    configurations = self._told(vote.term, vote.configurations).configurations
                    self._answer(
                        peers.Vote(vote.term, vote.voter, vote.granted, vote.closed, vote.voted_term, configurations)
                    )
            case electorate.ClaimLeadership(term, configurations):
                self.vote_links.say(
                    self._others(configurations[-1]),
                    peers.LeadershipClaim(self._loop.time(), self._told(term, configurations)),
                )
            case electorate.TakeOver(term):
                self._body.take_over(term)
            case electorate.ShareConfiguration(configurations):
                self._body.share(self._told(self._agent.term, configurations))
            case electorate.LoseNode(node, reason):
                self._body.lose_node(node, reason)
            case electorate.Fence(reason):
                self._body.fence(reason)
            case _:
                assert_never(output)

    def _heard(self, message: peers.Message, answer: Callable[[peers.Message], None]) -> None:
        """Take in what another agent says on a connection for votes."""
        self._answer = answer
        match message:
            case peers.VoteRequest(term, candidate, log_term, log_entries, configuration):
                log = electorate.LogIndex(log_term, log_entries)
                self.hear(electorate.VoteAsked(term, candidate, log, configuration))
            case peers.Vote(term, voter, granted, closed, voted_term, configurations):
                told = self._learn(peers.Agents(term, configurations))
                self.hear(electorate.VoteGiven(term, voter, granted, closed, voted_term, told))
                if self._agent.role is ElectionRole.LEADER:  # it came late: enough had voted
                    answer(peers.LeadershipClaim(self._loop.time(), self.agents()))
            case peers.LeadershipClaim(sent_at, agents):
                self.hear_claim(agents)
                if self._agent.term == agents.term:
                    answer(
                        peers.HeartbeatAck(agents.term, sent_at, self._agent.configuration.number, node=self._agent.me)
                    )
            case peers.HeartbeatAck(term, sent_at, configuration, node=node) if node:
                self.answered(HeardFromAgent(NodeId(node), term, sent_at, configuration))
            case _:
                pass  # of no meaning here
        self._answer = None

    def _learn(self, told: peers.Agents) -> tuple[Configuration, ...]:
        """Note where agents listen; return the configurations without that."""
        for configuration in told.configurations:
            for peer in configuration.agents:
                if peer.port:  # else whoever tells does not know it
                    self.know(peer)
        return configurations_of(told)

    def _others(self, configuration: Configuration) -> list[Peer]:
        found = (self._addresses.get(node) for node in configuration.agents if node != self._agent.me)
        return [peer for peer in found if peer is not None]

    def _told(self, term: int, configurations: tuple[Configuration, ...]) -> peers.Agents:
        def listed(configuration: Configuration) -> peers.ConfigurationMessage:
            known = (self._addresses.get(node, Peer(node, "", 0)) for node in configuration.agents)
            return peers.ConfigurationMessage(configuration.number, configuration.leader, tuple(known))

        return peers.Agents(term, tuple(map(listed, configurations)))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline = None if self._closed else election.next_deadline(self._agent)
        self._timer = None if deadline is None else self._loop.call_at(deadline, self.hear, electorate.Tick())


def configurations_of(told: peers.Agents) -> tuple[Configuration, ...]:
    """Return the configurations without the addresses."""
    return tuple(
        Configuration(configuration.number, configuration.leader, tuple(peer.node for peer in configuration.agents))
        for configuration in told.configurations
    )
