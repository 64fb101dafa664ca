"""Events: facts that are reported to the coordinator, in the past tense. Closed union: `Event`.

Those of one worker are in `worker_events`, and can be imported from here.
"""

from deadpool_run.core.found import Discards, WorkerFound
from deadpool_run.core.injection import KillHow
from deadpool_run.core.worker_events import (
    AbortCompleted,
    AbortFailed,
    AttachFailed,
    CaptureSkipped,
    CollectiveFailed,
    FetchFailed,
    FirstStepCompleted,
    JobRefused,
    LoopBypassed,
    LoopFinished,
    PrepareFailed,
    RankAttached,
    RankRestored,
    ReplacementRehearsed,
    RunUnwound,
    ScriptInitialized,
    SetupCompleted,
    SparePrepared,
    StepsLimited,
    TranscriptCompleted,
    WorkerEvent,
    WorkerExited,
    WorkerHung,
    WorkerRaised,
    WorkerReady,
    WorkerStarted,
    WorkerStartFailed,
)
from deadpool_run.ids import ONLY_NODE, Epoch, NodeId, Rank, Version, WorkerId
from deadpool_run.structs import Port, Tagged, Untagged

__all__ = [
    "AbortCompleted",
    "AbortFailed",
    "AgentKillRequested",
    "AttachFailed",
    "CaptureSkipped",
    "CollectiveFailed",
    "CoordinatorMoved",
    "CopyRefused",
    "DeviceFailed",
    "DrainRequested",
    "Event",
    "FetchFailed",
    "FirstStepCompleted",
    "JobRefused",
    "JobSubmitted",
    "KillRequested",
    "LoopBypassed",
    "LoopFinished",
    "NodeJoined",
    "NodeLost",
    "NodeResynced",
    "NodesLost",
    "Place",
    "PrepareFailed",
    "RankAttached",
    "RankRestored",
    "RanksReported",
    "RefusedCopyTaken",
    "ReplacementRehearsed",
    "ReplicasReported",
    "RunUnwound",
    "ScriptInitialized",
    "SetupCompleted",
    "SlowRequested",
    "SnapshotCommitted",
    "SparePrepared",
    "StepsLimited",
    "StopRequested",
    "TimeAdvanced",
    "TranscriptCompleted",
    "WorkerEvent",
    "WorkerExited",
    "WorkerHung",
    "WorkerRaised",
    "WorkerReady",
    "WorkerStartFailed",
    "WorkerStarted",
]

_NO_EPOCH = Epoch(0)


class Place(Untagged):
    """Where a node is. `failure_domain` names what it shares with its neighbours (a switch); empty if that is not known.

    `order` is the user's or the scheduler's place for it among the nodes; None if arrival decides.
    """

    name: str = "localhost"
    address: str = "127.0.0.1"
    port: Port = 0
    failure_domain: str = ""
    order: int | None = None
    devices: int = 0
    """GPUs, of which each rank uses one; 0 if there are fewer GPUs than ranks, and ranks share them or use none."""


class JobSubmitted(Tagged):
    """The first agent is up, and its node joins. Always the first event."""

    node: NodeId = ONLY_NODE
    place: Place = Place()
    term: int = 0
    """Larger than 0 if the run was founded before, and ended to be started again."""


class NodeJoined(Tagged):
    """A further agent is up, at the start or later. Its node has no workers yet."""

    node: NodeId
    place: Place


class NodeLost(Tagged):
    """The node's agent ended, is silent or was fenced: its workers count as dead, and its vault as gone."""

    node: NodeId
    reason: str


class NodesLost(Tagged):
    """These nodes were lost together, as with a switch or a rack: one loss, and one repair."""

    losses: tuple[NodeLost, ...]


class CoordinatorMoved(Tagged):
    """The coordinator runs on another node from now on, in a larger term.

    Its log may lack the last coordinator's last orders, so each node's agent reports what is there (`NodeResynced`).
    """

    term: int
    node: NodeId


class NodeResynced(Tagged):
    """The inventory of a node after the coordinator moved: every worker of this generation that was started there.

    `discarded` is the epoch and the version of the last `DiscardAbove` that reached the node, and `earlier` those before it,
    without the ones that a later one covers: it had the same version, or an older one. `holds` are the ranks of which
    its vault has anything, also of what arrives just now. `failed_devices` are the local ranks and reasons of `DeviceFailed`.
    """

    node: NodeId
    workers: tuple[WorkerFound, ...]
    discarded: tuple[Epoch, Version] = (_NO_EPOCH, Version(-1))
    holds: tuple[Rank, ...] = ()
    failed_devices: tuple[tuple[int, str], ...] = ()
    earlier: Discards = ()


class SnapshotCommitted(Tagged):
    """Every rank's snapshot and transcript are on all buddies of the rank.

    Reported once in a generation, and once after each loss of a node.
    """

    version: Version
    epoch: Epoch


class ReplicasReported(Tagged):
    """The node holds the rank's transcript and these complete versions. Answers `ReportReplicas`."""

    node: NodeId
    rank: Rank
    epoch: Epoch
    versions: tuple[Version, ...]


class CopyRefused(Tagged):
    """The node has no memory for copies of this rank. Reported by the rank's own node, and again after a takeover."""

    node: NodeId
    rank: Rank


class RefusedCopyTaken(Tagged):
    """The node has accepted a copy of this rank that it had refused before."""

    node: NodeId
    rank: Rank


class DeviceFailed(Tagged):
    """The driver of the node's machine reports that the GPU of this local rank failed."""

    node: NodeId
    local_rank: int
    reason: str


class KillRequested(Tagged):
    """A user injects a fault into the worker of a rank, or into a spare; then the rank has no meaning."""

    rank: Rank
    how: KillHow
    spare: WorkerId | None = None


class SlowRequested(Tagged):
    """A user injects a fault into the worker of a rank: for a time it takes `factor` times as long for everything."""

    rank: Rank
    factor: float
    for_s: float


class AgentKillRequested(Tagged):
    """A user injects a fault into a node: the end of its agent."""

    node: NodeId


class DrainRequested(Tagged):
    """A user asks that a rank, or every rank of a node, moves to a spare at a step's end. One of the two is set."""

    rank: Rank | None = None
    node: NodeId | None = None


class StopRequested(Tagged):
    """A user or the system asks the whole job to end, by this signal, or by a command (0)."""

    signal: int
    exit_code: int = 1
    """The job's exit code. A leader that takes over does not know why the job was to end."""


class TimeAdvanced(Tagged):
    """A deadline of the state has been reached."""


RankReport = AbortCompleted | RankRestored | RankAttached | FirstStepCompleted
"""A report that each rank gives in a repair."""


class RanksReported(Tagged):
    """These reports arrived in one turn of the leader's loop: it decides on them together."""

    reports: tuple[RankReport, ...]


Event = (
    WorkerEvent
    | RanksReported
    | JobSubmitted
    | NodeJoined
    | NodeLost
    | NodesLost
    | CoordinatorMoved
    | NodeResynced
    | SnapshotCommitted
    | ReplicasReported
    | CopyRefused
    | RefusedCopyTaken
    | DeviceFailed
    | KillRequested
    | SlowRequested
    | AgentKillRequested
    | DrainRequested
    | StopRequested
    | TimeAdvanced
)
