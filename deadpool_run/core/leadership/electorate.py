"""The agents among whom a coordinator has authority: what they tell one another, and what each knows. See `election`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from deadpool_run.ids import NodeId

LOG_FOLLOWERS = 2
NEVER, FOREVER = float("-inf"), float("inf")


class ElectionRole(StrEnum):
    """What an agent is to the others."""

    FOLLOWER = "follower"
    CANDIDATE = "candidate"
    LEADER = "leader"
    FENCED = "fenced"
    """It ends its workers, and obeys and votes no more. Its node may join again under another name."""


@dataclass(frozen=True, slots=True, order=True)
class LogIndex:
    """How far a log is followed: the term of its last entry, and the number of entries."""

    term: int = 0
    entries: int = 0


@dataclass(frozen=True, slots=True)
class Configuration:
    """The agents that count, in order of arrival. `number` grows with each change, over terms too."""

    number: int
    leader: NodeId
    agents: tuple[NodeId, ...]

    @property
    def log_followers(self) -> tuple[NodeId, ...]:
        """Return who follows the log, in the order in which they take over."""
        return tuple(agent for agent in self.agents if agent != self.leader)[:LOG_FOLLOWERS]


@dataclass(frozen=True, slots=True)
class HeardFromLeader:
    """A message of a leader, with its configurations, the newest last. A heartbeat is answered at once, with when it was sent."""

    term: int
    configurations: tuple[Configuration, ...]
    claim: bool = False
    """It is elected, and decides nothing before a majority has answered this."""


@dataclass(frozen=True, slots=True)
class HeardFromAgent:
    """An agent answered the heartbeat of this term that was sent at `sent_at`; it knows the configuration of this number."""

    agent: NodeId
    term: int
    sent_at: float
    configuration: int


@dataclass(frozen=True, slots=True)
class HeardFromAgents:
    """Several answers. Nothing is lost if they are told later than they came, but before anything else is."""

    heard: tuple[HeardFromAgent, ...]


@dataclass(frozen=True, slots=True)
class LinkBroken:
    """The connection to the leader is gone. `closed`: by its end or a reset, which an agent's end alone causes."""

    closed: bool


@dataclass(frozen=True, slots=True)
class AgentsJoined:
    """The leader has taken agents in: at once, since each change of the configuration is told to all."""

    agents: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """An agent's process ended for sure: its connection was closed, or its host refuses one."""

    agent: NodeId


@dataclass(frozen=True, slots=True)
class LogFollowed:
    """The log is followed as far as this."""

    log: LogIndex


@dataclass(frozen=True, slots=True)
class VoteAsked:
    """A log follower would take over."""

    term: int
    candidate: NodeId
    log: LogIndex
    configuration: int


@dataclass(frozen=True, slots=True)
class VoteGiven:
    """An agent's answer. `closed` is the leader that it followed, if it saw that its process ended.

    `voted_term` is the largest term that it voted in.
    `configurations` are those that count, where a newer one is known than the candidate's.
    """

    term: int
    voter: NodeId
    granted: bool
    closed: NodeId | None
    voted_term: int
    configurations: tuple[Configuration, ...] = ()


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline was reached."""


Event = (
    HeardFromLeader
    | HeardFromAgent
    | HeardFromAgents
    | LinkBroken
    | AgentsJoined
    | AgentEnded
    | LogFollowed
    | VoteAsked
    | VoteGiven
    | Tick
)


@dataclass(frozen=True, slots=True)
class RequestVotes:
    """Ask every agent of the configuration."""

    asked: VoteAsked


@dataclass(frozen=True, slots=True)
class GiveVote:
    """Answer a candidate."""

    candidate: NodeId
    vote: VoteGiven


@dataclass(frozen=True, slots=True)
class ClaimLeadership:
    """Send a heartbeat of this term, marked as a claim, to every agent of the newest configuration: enough votes are there."""

    term: int
    configurations: tuple[Configuration, ...]


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Decide from now on: a majority follows."""

    term: int
    configuration: Configuration


@dataclass(frozen=True, slots=True)
class ShareConfiguration:
    """Send a heartbeat with these configurations to every agent at once: there is a new one, or an old one counts no more."""

    configurations: tuple[Configuration, ...]


@dataclass(frozen=True, slots=True)
class LoseNode:
    """The node is lost: tell the coordinator."""

    node: NodeId
    reason: str


@dataclass(frozen=True, slots=True)
class Fence:
    """End every worker of this node, and obey nobody; only then close its connections."""

    reason: str


Output = RequestVotes | GiveVote | ClaimLeadership | TakeOver | ShareConfiguration | LoseNode | Fence


@dataclass(frozen=True, slots=True)
class Agent:
    """What one agent knows of the others."""

    me: NodeId
    timeout_s: float
    role: ElectionRole
    configurations: tuple[Configuration, ...]
    """The newest last, with those before it until a majority of each knows the next: authority needs a majority of all."""
    heard_at: float
    """When the leader, or one that is to be, was last heard of (an agent that has just joined has just heard of it)."""
    governed_at: float
    """When a leader that decides was last heard of."""
    term: int = 0
    """Of the leader that it follows or is."""
    closed_at: float | None = None
    """When the leader's process was seen to end."""
    log: LogIndex = LogIndex()
    voted_term: int = 0
    """The largest term that it voted in, or its leader's. Never falls."""
    voted_for: NodeId | None = None
    seen: int = 0
    """The largest term that anybody is known to have voted in."""
    ended: frozenset[NodeId] = frozenset()
    """Agents whose process ended for sure: they do not count."""
    candidate_term: int = 0
    """The term that it is a candidate for."""
    votes: frozenset[NodeId] = frozenset()
    asked_at: float = NEVER
    claimed_at: float = NEVER
    bids_from: float = NEVER
    """It is no candidate before this."""
    prompted_at: float = FOREVER
    """A candidate that knows less of the log was refused, and may never be elected: it is not waited for after this."""
    looked_at: float = NEVER
    """When it was last told anything."""
    answers: Mapping[NodeId, float] = field(default_factory=dict)
    """When the newest heartbeat that each agent answered was sent. Never changed in place."""
    waits_from: Mapping[NodeId, float] = field(default_factory=dict)
    """Since when each agent's answers are waited for. Never changed in place."""
    known: Mapping[NodeId, int] = field(default_factory=dict)
    """The number of the newest configuration that each agent knows. Never changed in place."""

    @property
    def configuration(self) -> Configuration:
        """Return the newest configuration."""
        return self.configurations[-1]
