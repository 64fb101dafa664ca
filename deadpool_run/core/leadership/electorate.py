"""The messages of an election, and the knowledge of each agent. See `election`.

Agents send each other what is `Tagged`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from deadpool_run.ids import NodeId
from deadpool_run.structs import Tagged, Untagged

MAX_VOTERS = 5
NEVER, FOREVER = float("-inf"), float("inf")


class ElectionRole(StrEnum):
    """The role of an agent."""

    FOLLOWER = "follower"
    PRECANDIDATE = "precandidate"
    """Asks the others whether they would vote for it. No term changes."""
    CANDIDATE = "candidate"
    ELECTED = "elected"
    """Has the votes, and decides nothing before a majority knows its configuration."""
    LEADER = "leader"
    FENCED = "fenced"
    """Ends its workers, and takes no part any more. Its node may join again under another name."""


class LogIndex(Untagged, order=True):
    """The end of a followed log: the term of its last entry, and the number of entries."""

    term: int = 0
    entries: int = 0


class Configuration(Untagged):
    """The voters, as the leader of `term` decided. `number` grows with each change, over terms too."""

    term: int
    number: int
    leader: NodeId
    voters: tuple[NodeId, ...]

    @property
    def index(self) -> tuple[int, int]:
        """Return its place in the order of all configurations."""
        return self.term, self.number

    def is_majority(self, who: Collection[NodeId]) -> bool:
        """Tell whether these are more than half of the voters."""
        return 2 * sum(voter in who for voter in self.voters) > len(self.voters)


class HeardFromLeader(Untagged):
    """A message of a leader: the configurations that count, the newest last.

    Times are of the leader's clock: `sent_at` is when a heartbeat or a claim was sent, `answered` when the newest heartbeat was sent
    of which the leader has this agent's answer, and `lease_from` when the one was sent from which its lease counts.
    """

    configurations: tuple[Configuration, ...]
    sent_at: float | None = None
    answered: float | None = None
    lease_from: float | None = None
    """None without a lease, and infinity for a leader that decides alone."""


class Receipt(NamedTuple):
    """Times of a heartbeat that was received, by the receiver's clock."""

    at: float
    sent_after: float
    """It was certainly sent after this: the receiver had sent an answer, and the leader had that."""


class HeardFromAgent(Untagged):
    """An agent answered the heartbeat of this term that was sent at `sent_at`; it knows the configuration of this number."""

    agent: NodeId
    term: int
    sent_at: float
    configuration: int


class HeardFromAgents(Untagged):
    """Several answers. Nothing is lost if they are told later than they came, but before anything else is."""

    heard: tuple[HeardFromAgent, ...]


class AgentsJoined(Untagged):
    """Nodes have connected to the leader: new ones, or those of the last leader. It may make them voters."""

    failure_domains: Mapping[NodeId, str]
    """By agent: what it shares with others that fail together with it; empty if that is not known."""


class AgentEnded(Tagged):
    """An agent's machine has said that the agent and its workers ended."""

    agent: NodeId


class AgentRefused(Untagged):
    """An agent's connection was closed, and its host refuses another. A firewall does that too.

    It counts only where two agents vote, and neither a third nor an external authority could say more.
    """

    agent: NodeId


class Evicted(Untagged):
    """A leader of this term has given the node up."""

    term: int
    reason: str


class LogFollowed(Untagged):
    """The log is followed as far as this."""

    log: LogIndex


class VoteAsked(Tagged):
    """A voter would take over. `configuration` is the index of its newest one, `voted_term` the largest term it voted in before.

    `pre_vote`: the question is only who would vote for it.
    """

    term: int
    candidate: NodeId
    configuration: tuple[int, int]
    log: LogIndex
    voted_term: int
    pre_vote: bool


class VoteGiven(Tagged):
    """An agent's answer. `ended` is the leader that it followed, if that certainly ended.

    `voted_term` is the largest term that it voted in.
    """

    term: int
    voter: NodeId
    pre_vote: bool
    granted: bool
    voted_term: int
    ended: NodeId | None = None


class AuthorityAnswered(Untagged):
    """The external authority's answer to an `AskAuthority`."""

    term: int
    pre_vote: bool
    granted: bool


class Tick(Untagged):
    """A deadline was reached."""


Event = (
    HeardFromLeader
    | HeardFromAgent
    | HeardFromAgents
    | AgentsJoined
    | AgentEnded
    | AgentRefused
    | Evicted
    | LogFollowed
    | VoteAsked
    | VoteGiven
    | AuthorityAnswered
    | Tick
)


class RequestVotes(Untagged):
    """Ask these voters."""

    asked: VoteAsked
    voters: tuple[NodeId, ...]


class AskAuthority(Untagged):
    """Claim this term with the external authority. `pre_vote`: only find out whether it would be granted."""

    term: int
    pre_vote: bool


class GiveVote(Untagged):
    """Answer a candidate."""

    candidate: NodeId
    vote: VoteGiven


class ClaimLeadership(Untagged):
    """Send these configurations, of which the newest is the sender's first, to every voter of them."""

    configurations: tuple[Configuration, ...]


class TakeOver(Untagged):
    """Decide from now on: a majority follows."""

    configuration: Configuration


class ShareConfiguration(Untagged):
    """Send these configurations to every follower: there is a new one, or an old one counts no more."""

    configurations: tuple[Configuration, ...]


class LoseNode(Untagged):
    """The node is lost, and its workers run no more: tell the coordinator."""

    node: NodeId
    reason: str


class SuspendWorkers(Untagged):
    """Stop this node's workers with SIGSTOP: soon another node may have their ranks."""


class ResumeWorkers(Untagged):
    """Let this node's workers go on: the leader counts on them."""


class Fence(Untagged):
    """End every worker of this node, and obey no leader; only then close its connections."""

    reason: str


Output = (
    RequestVotes
    | AskAuthority
    | GiveVote
    | ClaimLeadership
    | TakeOver
    | ShareConfiguration
    | LoseNode
    | SuspendWorkers
    | ResumeWorkers
    | Fence
)


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent's knowledge of the others. Mappings are never changed in place."""

    me: NodeId
    timeout_s: float
    role: ElectionRole
    configurations: tuple[Configuration, ...]
    """The newest last, and the one before it until a majority of each knows the newest."""
    heard_at: float
    """When the leader, or one that is elected, was last heard of."""
    governed_at: float
    """Until when this agent was certainly counted on."""
    term: int = 0
    """Of the leader that it follows or is."""
    heartbeats: Mapping[float, Receipt] = field(default_factory=dict)
    """The last heartbeats, by when they were sent. The first one was surely sent before the lease began."""
    ended: frozenset[NodeId] = frozenset()
    """Agents that certainly ended."""
    ruled_out: frozenset[NodeId] = frozenset()
    """Agents that can never lead again, since the external authority gave the next term to this one."""
    refused: frozenset[NodeId] = frozenset()
    """Agents whose connection was closed and whose host refuses another, since they were last heard of."""
    gone_at: float = NEVER
    """When this agent learned that its leader ended."""
    log: LogIndex = field(default_factory=LogIndex)
    voted_term: int = 0
    """The largest term that it voted in, or its leader's. Never falls."""
    voted_for: NodeId | None = None
    seen: int = 0
    """The largest term that anybody is known to have voted in."""
    suspended: bool = False
    """Whether this node's workers are stopped."""
    woken_at: float = NEVER
    """When this agent last noticed that it had not run for a while."""
    looked_at: float = NEVER
    """When it was last told anything."""
    # of a candidate
    candidate_term: int = 0
    votes: frozenset[NodeId] = frozenset()
    began_at: float = NEVER
    asked_at: float = NEVER
    candidacies_from: float = NEVER
    """It is no candidate before this."""
    # of a leader, or of one that is elected
    lapsed_at: float | None = None
    """Since when it lacks a lease."""
    answers: Mapping[NodeId, float] = field(default_factory=dict)
    """When the newest heartbeat that each agent answered was sent."""
    answered_at: Mapping[NodeId, float] = field(default_factory=dict)
    """When the newest answer of each agent came, or when it joined: these are the nodes that the leader counts on."""
    known: Mapping[NodeId, int] = field(default_factory=dict)
    """The number of the newest configuration that each agent knows."""
    failure_domains: Mapping[NodeId, str] = field(default_factory=dict)
    claims: bool = False
    """Of two voters that do not hear each other, an external authority decides which one leads."""

    @property
    def configuration(self) -> Configuration:
        """Return the newest configuration."""
        return self.configurations[-1]

    @property
    def voting(self) -> frozenset[NodeId]:
        """Return the voters of every configuration that counts."""
        return frozenset().union(*(configuration.voters for configuration in self.configurations))


StepResult = tuple[Agent, tuple[Output, ...]]
"""The agent's next knowledge, and its orders."""
