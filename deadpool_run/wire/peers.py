"""What the agents of a job say to each other over a member's connection, and how it becomes bytes. No sockets here.

A frame is a 4-byte big-endian length and a JSON object, whose `type` names the message class; its fields are checked
against the class. Events and effects travel as `wire.facts` has them.
"""

from typing import Any

from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event, NodeResynced, Place
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.ids import NodeId
from deadpool_run.structs import Record, Tagged
from deadpool_run.wire import typed
from deadpool_run.wire.frames import pack

MAX_FRAME_BYTES = 16 << 20


class Peer(Record):
    """Where a node's agent listens."""

    node: NodeId
    address: str
    port: int


# --- a node's agent to the coordinator's ---------------------------------------------------------------------------


class Join(Tagged):
    """Take this node in. `nproc_per_node` must be everybody's."""

    place: Place
    nproc_per_node: int


class Fact(Tagged):
    """An event of this node."""

    event: Event


class Safe(Tagged):
    """What all holders of a rank's copies now have complete, in this life of the world."""

    timeline: int
    rank: int
    versions: tuple[int, ...]
    transcript: bool


class Rejoin(Tagged):
    """Go on with this node, which another coordinator has taken in; `found` is its `NodeResynced`."""

    node: NodeId
    place: Place
    found: NodeResynced


class Traffic(Record):
    """Bytes of copies that went between this node and others: all so far, a second of late, and those of its last replacement."""

    sent_bytes: int
    received_bytes: int
    spared_bytes: int
    """What was not sent, for the node that it was for had it already."""
    sent_bytes_per_s: float
    received_bytes_per_s: float
    fetched_bytes: int
    fetched_s: float
    """How long a replacement's last snapshot took to come here, the connection included; 0 if none came."""


class HeartbeatAck(Tagged):
    """The answer to a `Heartbeat`, at once. `rank_entries` are what the node's workers say on its status page: the rank, then a rank entry's words."""

    term: int
    sent_at: float
    configuration: int
    node: str = ""
    """Said only where the connection does not tell it."""
    rank_entries: tuple[tuple[int, ...], ...] = ()
    traffic: Traffic | None = None


class PreemptionNotice(Tagged):
    """The end of the job was announced to this node: a durable checkpoint is to be written."""


class Saved(Tagged):
    """The answer to a `Save`: the step is taken, or why not. The last of them says where the checkpoint is."""

    attempt: str
    step: str
    failure: str
    where: str
    nbytes: int
    again: bool = False
    """A later version may be written instead: this one is not held any more."""


class Loaded(Tagged):
    """The answer to a `Load`: the slots hold it, or why not."""

    attempt: str
    failure: str


class Ask(Tagged):
    """A viewer's request, as on the control socket."""

    number: int
    request: dict[str, Any]


# --- the coordinator's agent to a node's -----------------------------------------------------------------------------


class Joined(Tagged):
    """The node is taken in under this id. `settings` are the job's, whatever the node's own command line said.

    So is `durable`, which says where checkpoints are kept; empty: nowhere.
    """

    node: NodeId
    run_id: str
    run_name: str
    settings: Settings
    durable: dict[str, Any]


class Heartbeat(Tagged):
    """I live, and decide. `sent_at` is the coordinator's clock; of the configurations of the last `Agents`, these count."""

    term: int
    sent_at: float
    oldest: int
    newest: int


class ConfigurationMessage(Record):
    """See `core.electorate.ConfigurationMessage`, with where the agents listen."""

    number: int
    leader: NodeId
    agents: tuple[Peer, ...]


class Agents(Tagged):
    """Who counts when a coordinator is to be chosen: all of these configurations, the newest last."""

    term: int
    configurations: tuple[ConfigurationMessage, ...]


class LogState(Tagged):
    """To a log follower: all that was decided so far. `entries` counts the facts that led to it; `now` is the last one's time."""

    term: int
    entries: int
    now: float
    state: State


class LogEntry(Tagged):
    """To a log follower: a further fact, decided on at `now`."""

    term: int
    entries: int
    now: float
    event: Event


class World(Tagged):
    """What every assignment depends on. `timeline` begins anew with each generation and each rollback."""

    generation: int
    timeline: int
    store_host: str
    store_port: int


class Order(Tagged):
    """An effect for this node. `source` is where the node that the effect names is to be reached."""

    effect: Effect
    capture_interval: int
    source: Peer | None = None


class Buddies(Tagged):
    """Whom the copies of this node's ranks go to, and of which ranks it is to hold copies."""

    mine: dict[str, tuple[Peer, ...]]
    keep: tuple[int, ...]


class Committed(Tagged):
    """The newest version that is safe everywhere (-1: none), and newer ones that will never be."""

    timeline: int
    version: int
    abandoned: tuple[int, ...]


class Save(Tagged):
    """Take a step (a `vault.durable.Step`) of writing the durable checkpoint of a version, with these ranks of yours.

    `attempt` tells it from any other; `firsts` has the first rank of each node that writes. Whoever `leads` does what is
    done once. The version is held by every rank until it is copied.
    """

    attempt: str
    step: str
    ranks: tuple[int, ...]
    firsts: tuple[int, ...]
    target: str
    version: int
    keep: int
    leads: bool


class Void(Tagged):
    """Nothing will become of this attempt at a durable checkpoint."""

    attempt: str


class Load(Tagged):
    """Fill the slots of these ranks, which you will be given, from a checkpoint."""

    attempt: str
    ranks: tuple[int, ...]
    where: str
    version: int


class Durable(Tagged):
    """The newest durable checkpoint of the job, written (ISO-8601, UTC) or gone on from."""

    version: int
    where: str
    written: str


class Answer(Tagged):
    """To an `Ask`."""

    number: int
    answer: dict[str, Any]


class Redirect(Tagged):
    """I do not lead the job; this one does. `agents` are its configurations, in the term in which it leads."""

    leader: Peer
    agents: Agents


class Evict(Tagged):
    """This node is taken for lost: end your workers; you may join again."""

    reason: str


class End(Tagged):
    """The job is over."""

    exit_code: int
    reason: str


# --- between any two agents, while a coordinator is chosen ------------------------------------------------------------


class VoteRequest(Tagged):
    """See `core.electorate.VoteAsked`; the log's index is `log_term` and `log_entries`."""

    term: int
    candidate: NodeId
    log_term: int
    log_entries: int
    configuration: int


class Vote(Tagged):
    """See `core.electorate.VoteGiven`."""

    term: int
    voter: NodeId
    granted: bool
    closed: NodeId | None
    voted_term: int
    configurations: tuple[ConfigurationMessage, ...]


class LeadershipClaim(Tagged):
    """Enough have voted for me: follow me from now on. Answered with a `HeartbeatAck`."""

    sent_at: float
    agents: Agents


ToHead = Join | Rejoin | Fact | Safe | HeartbeatAck | PreemptionNotice | Saved | Loaded | Ask
_OfJob = Joined | World | Order | Buddies | Committed | Save | Void | Load | Durable | Answer | Redirect | Evict | End
ToNode = _OfJob | Heartbeat | Agents | LogState | LogEntry
Between = VoteRequest | Vote | LeadershipClaim
Message = ToHead | ToNode | Between

_DECODER: typed.Decoder[Message] = typed.Decoder(Message, "a message between agents")


def encode(message: Message) -> bytes:
    """Return the message as one frame. Raises `ProtocolError` if it is too large."""
    return pack(typed.to_json(message), MAX_FRAME_BYTES)


def decode(body: bytes) -> Message:
    """Return the message of one frame's body. Raises `ProtocolError` for anything that is not one."""
    return _DECODER.decode(body)
