"""Messages between the agents of a job, and their frames. No sockets here.

A frame is a 4-byte big-endian length and a JSON object whose `type` names the message class.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from msgspec import Meta, Raw

from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event, NodeResynced, Place
from deadpool_run.core.leadership.electorate import AgentEnded, Configuration, VoteAsked, VoteGiven
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.ids import NodeId, Rank
from deadpool_run.structs import Port, Tagged, Untagged
from deadpool_run.wire.checkpoints import CheckpointFailed, DurableSpec, StepTaken, TakeStep
from deadpool_run.wire.frames import MessageFormat, pack
from deadpool_run.wire.stores import CallersIdentified, IdentifyCallers
from deadpool_run.wire.typed import Decoder, to_json

MAX_FRAME_BYTES = 16 << 20


class Peer(Untagged):
    """The address of a node's agent."""

    node: NodeId
    address: str
    port: Port


# --- a node's agent to the leader's ----------------------------------------------------------------------------------


class Join(Tagged):
    """Asks to take this node in."""

    place: Place
    launch: dict[str, str]
    """The start values that all nodes must share, by names for messages."""


class Fact(Tagged):
    """Reports an event of this node."""

    event: Event


class Safe(Tagged):
    """Reports the versions of a rank that all holders of its copies have complete, and whether they have its transcript."""

    timeline: int
    rank: int
    versions: tuple[int, ...]
    transcript: bool
    buddies: int = 0
    """The number of the `Buddies` whose holders these are."""


class Rejoin(Tagged):
    """Asks a new leader to go on with this node, which a former leader took in.

    `reports` counts what the node had sent to this leader before its inventory, over connections that broke at once.
    """

    node: NodeId
    place: Place
    found: NodeResynced
    reports: int = 0


class ResumeLink(Tagged):
    """Goes on with this node over another connection. `received` counts the messages of the leader of this term that it has."""

    node: NodeId
    term: int
    received: int


class Traffic(Untagged):
    """Copies of snapshots that went between this node and others."""

    sent_bytes: int
    received_bytes: int
    spared_bytes: int
    """Not sent, because the receiver had these bytes already."""
    sent_bytes_per_s: float
    received_bytes_per_s: float
    copied_s: float
    """Time to copy the last snapshot of a rank here to another node. 0 if none was copied."""
    hashed_s: float
    """The part of `copied_s` in which digests were computed here."""
    fetched_bytes: int
    fetched_s: float
    """Time to fetch the last snapshot for a replacement here, the connection included. 0 if none was fetched."""
    without_memory: int
    """The number of ranks whose copies this node refuses for lack of memory."""


class HeartbeatAck(Tagged):
    """Answers a `Heartbeat` at once. `rank_entries` are those of the node's status page: each the rank and its words.

    `received` counts the leader's messages that came.
    """

    term: int
    sent_at: float
    configuration: int
    received: int = 0
    node: str = ""
    """Empty where the connection identifies the node."""
    rank_entries: tuple[tuple[int, ...], ...] = ()
    traffic: Traffic | None = None


class PreemptionNotice(Tagged):
    """Reports that the end of the job was announced to this node: the leader has a durable checkpoint written."""


class Saved(Tagged):
    """Answers a `TakeStep` of this attempt."""

    attempt: str
    answer: StepTaken | CheckpointFailed


class Loaded(Tagged):
    """Answers a `Load`. `failure` is empty if the slots hold the version."""

    attempt: str
    failure: str


class Ask(Tagged):
    """Passes on a viewer's request, as on the control socket."""

    number: int
    request: dict[str, Any]


class EndConfirmed(Tagged):
    """Answers an `End` at once: the node does not need this leader any more."""


# --- the leader's agent to a node's ----------------------------------------------------------------------------------


class Joined(Tagged):
    """Takes the node in under this id. `settings` and `durable` are the job's and replace those of the node's command line."""

    node: NodeId
    run_id: str
    run_name: str
    settings: Settings
    durable: DurableSpec | None


class Heartbeat(Tagged):
    """Tells that the leader is alive. `sent_at` is its clock. `oldest` and `newest` are the configurations that count now.

    `answered` is when the newest heartbeat was sent that the leader has this node's answer to, and `lease_from` when the one was
    sent from which its lease counts.
    """

    term: int
    sent_at: float
    oldest: int
    newest: int
    answered: float | None = None
    lease_from: float | None = None
    """None without a lease, and infinity for a leader that decides alone."""
    received: int = 0
    """The number of this node's messages that came."""


class Agents(Tagged):
    """Lists the configurations whose voters elect a leader, the newest last. A leader needs a majority of each."""

    configurations: Annotated[tuple[Configuration, ...], Meta(min_length=1)]
    peers: tuple[Peer, ...]
    """The voters whose addresses are known."""


class LogState(Tagged):
    """Gives a log follower a part of the whole state after `entries` events, the last of them decided at `now`."""

    term: int
    entries: int
    now: float
    part: bytes
    """Of the state as JSON."""
    is_last: bool


class LogEntry(Untagged):
    """An event, decided at `now`."""

    now: float
    event: Event


class LogEntries(Tagged):
    """Gives a log follower the events after the first `after`, all of one turn of the leader's loop or a part of them."""

    term: int
    after: int
    entries: tuple[LogEntry, ...]


class World(Tagged):
    """Tells what every assignment depends on. Each generation and each rollback begins another `timeline`."""

    generation: int
    timeline: int
    store_host: str
    store_port: int


class Order(Tagged):
    """Orders an effect on this node. `source` is the address of the node that the effect names."""

    effect: Effect
    capture_interval: int
    source: Peer | None = None


class Buddies(Tagged):
    """Lists the nodes that get copies of this node's ranks, and the ranks of which this node keeps copies.

    `groups` are the groups of such ranks that share a parity. `number` is another one in each such message of a job to a node.
    """

    mine: dict[Rank, tuple[Peer, ...]]
    keep: tuple[Rank, ...]
    groups: tuple[tuple[Rank, ...], ...] = ()
    number: int = 0


class Committed(Tagged):
    """Tells the newest version that every rank has safe (-1: none), and newer versions that never will be."""

    timeline: int
    version: int
    abandoned: tuple[int, ...]


class Void(Tagged):
    """Cancels an attempt at a durable checkpoint."""

    attempt: str


class Load(Tagged):
    """Orders to fill the slots of these ranks, which the node will be assigned, from a checkpoint.

    `record` is the digest of its record: another one under this path is refused.
    """

    attempt: str
    ranks: tuple[int, ...]
    where: str
    record: str


class Durable(Tagged):
    """Tells the newest durable checkpoint that the job has written or resumed from. `written` is ISO-8601, UTC."""

    version: int
    where: str
    written: str


class Answer(Tagged):
    """Answers an `Ask`."""

    number: int
    answer: Raw
    """A JSON object on one line, which nobody on the way needs to read."""


class Redirect(Tagged):
    """Names the leader to a node that asked another. `agents` are the leader's configurations and term."""

    leader: Peer
    agents: Agents


class LinkResumed(Tagged):
    """Answers a `ResumeLink` or a `Rejoin`: `received` counts the node's messages that came or are older than its inventory."""

    received: int


class Evict(Tagged):
    """Tells a node that it counts as lost: it ends its workers, and may join again."""

    reason: str


DRAINED = "this node was drained, and has left the job, which continues"
"""The reason of an `End` for one node."""


class End(Tagged):
    """Tells that the job is over, for all or for a drained node. Answered with an `EndConfirmed`."""

    exit_code: int
    reason: str


# --- between any two agents, in an election --------------------------------------------------------------------------


class LeadershipClaim(Tagged):
    """Tells that the leader of these configurations was elected. Answered with a `HeartbeatAck`."""

    sent_at: float
    agents: Agents
    relay: tuple[Peer, ...] = ()
    """Other agents that the receiver is to tell."""


NodeReport = Fact | Safe | Saved | Loaded | PreemptionNotice | CallersIdentified
"""The reports of a node, also to the leader in its own process."""
ToLeader = Join | Rejoin | ResumeLink | HeartbeatAck | NodeReport | Ask | EndConfirmed
ToNode = (
    Joined
    | World
    | Order
    | Buddies
    | Committed
    | TakeStep
    | Void
    | Load
    | Durable
    | IdentifyCallers
    | Answer
    | Redirect
    | LinkResumed
    | Evict
    | End
    | Heartbeat
    | Agents
    | LogState
    | LogEntries
)
Between = VoteAsked | VoteGiven | AgentEnded | LeadershipClaim
Message = ToLeader | ToNode | Between

_STATE: Decoder[State] = Decoder(State, "a coordinator's state")
_PART_BYTES = MAX_FRAME_BYTES // 2
"""Bytes become a third more in JSON."""


def log_state(term: int, entries: int, now: float, state: State) -> Iterator[LogState]:
    """Yield the messages that give a log follower this state: one of ten thousand machines is too large for one."""
    data = to_json(state)
    for begin in range(0, len(data), _PART_BYTES):
        part = data[begin : begin + _PART_BYTES]
        yield LogState(term, entries, now, part, is_last=begin + _PART_BYTES >= len(data))


def log_frames(term: int, after: int, entries: Sequence[LogEntry]) -> Iterator[bytes]:
    """Yield the frames that give a log follower these entries: one, unless they are larger. Raises `ProtocolError`."""
    body = to_json(LogEntries(term, after, tuple(entries)))
    half = len(entries) // 2
    if len(body) <= MAX_FRAME_BYTES or not half:
        yield pack(body, MAX_FRAME_BYTES)
    else:
        yield from log_frames(term, after, entries[:half])
        yield from log_frames(term, after + half, entries[half:])


def state_of(parts: Iterable[bytes]) -> State:
    """Return the state of all its parts. Raises `ProtocolError`."""
    return _STATE.decode(b"".join(parts))


FORMAT: MessageFormat[Message] = MessageFormat(Message, "a message between agents", MAX_FRAME_BYTES)
encode, decode = FORMAT.encode, FORMAT.decode
