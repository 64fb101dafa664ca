"""Events: facts that are reported to the coordinator, in the past tense. Closed union: `Event`."""

from deadpool_run.core.found import WorkerFound
from deadpool_run.core.injection import KillHow
from deadpool_run.errors import Blame
from deadpool_run.ids import ONLY_NODE, Epoch, NodeId, Rank, Version, WorkerId
from deadpool_run.structs import Port, Tagged, Untagged

_NO_EPOCH = Epoch(0)


class _OfWorker(Tagged):
    """An event of one worker."""

    worker: WorkerId


class _OfWorkerInEpoch(_OfWorker):
    """An event of one worker that counts in this epoch only."""

    epoch: Epoch


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

    `discarded` is the epoch and the version of the last `DiscardAbove` that reached the node. `holds` are the ranks of which
    its vault has anything, also of what arrives just now. `failed_devices` are the local ranks and reasons of `DeviceFailed`.
    """

    node: NodeId
    workers: tuple[WorkerFound, ...]
    discarded: tuple[Epoch, Version] = (_NO_EPOCH, Version(-1))
    holds: tuple[Rank, ...] = ()
    failed_devices: tuple[tuple[int, str], ...] = ()


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


class FetchFailed(_OfWorkerInEpoch):
    """A replacement's transcript or snapshot could not be fetched from this node."""

    source: NodeId
    message: str


class WorkerStarted(_OfWorker):
    """A process exists for this worker."""

    pid: int


class WorkerReady(_OfWorker):
    """The worker has completed its imports and is parked: it can take a rank at once."""


class SparePrepared(_OfWorker):
    """The spare has rehearsed as it was ordered, and waits for a rank, preferably for that one."""


class PrepareFailed(_OfWorker):
    """The spare could not rehearse the script before it had a rank, and ends."""

    message: str


class WorkerStartFailed(_OfWorker):
    """No process could be made for this worker."""

    reason: str


class ScriptInitialized(_OfWorker):
    """The worker's script called `init()`: its step can be interrupted and repaired (a *managed* worker)."""


class SetupCompleted(_OfWorker):
    """The worker entered its step loop and captured snapshot 0."""


class TranscriptSealed(_OfWorker):
    """A replacement can rehearse the set-up and the first two steps of the worker's rank from now on.

    `like` is the lowest of the ranks that hold the same parameters; None if no other rank does.
    """

    like: Rank | None = None


class WorkerRaised(_OfWorker):
    """The worker's script ended with an exception; its exit follows. `step` is None outside the step loop."""

    step: int | None
    kind: str
    message: str
    traceback: str
    blame: Blame = Blame.SCRIPT


class JobRefused(_OfWorker):
    """The library in this worker cannot keep the weights exact, or cannot work with this script: the job must end."""

    message: str
    exit_code: int


class LoopBypassed(_OfWorker):
    """The worker's script called `init()`, and updates weights outside `job.steps()`: no snapshot has them."""


class WorkerExited(_OfWorker):
    """The worker's process ended and was reaped. Exactly one of `code` and `signal` is set.

    `captured` are the complete versions in its vault slots, read after its death.
    """

    code: int | None
    signal: int | None
    captured: tuple[Version, ...] = ()


class AbortCompleted(_OfWorkerInEpoch):
    """The worker's interrupted step has run to its end, and the worker waits.

    `live` is the version that its objects hold now; None if they hold none, after an interruption between optimizers. Then
    the worker can resume only from one of `captured`. `completed` is the number of steps it had completed.
    """

    completed: Version
    live: Version | None
    captured: tuple[Version, ...]


class AbortFailed(_OfWorkerInEpoch):
    """The worker's script raised while its step was aborted. Its objects may be inconsistent, so it cannot continue.

    `again`: it can run its script again from the top, and waits for that order. `kind` and what follows are of the exception.
    """

    message: str
    again: bool = False
    step: int | None = None
    kind: str = ""
    error: str = ""
    traceback: str = ""
    blame: Blame = Blame.SCRIPT


class RunUnwound(_OfWorker):
    """The worker has left a run of its script whose step could not be aborted. It runs the script again, as a replacement.

    `captured` are the versions in its slots, `completed` is the number of steps it had completed. Valid in every epoch,
    since nothing is captured before the rank is restored.
    """

    completed: Version
    captured: tuple[Version, ...]


class ReplacementRehearsed(_OfWorkerInEpoch):
    """The replacement has run set-up and its two rehearsal steps."""


class RankRestored(_OfWorkerInEpoch):
    """The member's objects hold the resume version; it can attach."""


class RankAttached(_OfWorkerInEpoch):
    """Every communicator of the member is attached to the epoch."""


class AttachFailed(_OfWorkerInEpoch):
    """The member could not build its communicators for the epoch (a peer may have died meanwhile)."""

    message: str


class FirstStepCompleted(_OfWorkerInEpoch):
    """The member has completed its first step since it attached to the epoch."""


class CollectiveFailed(_OfWorkerInEpoch):
    """A collective of the member failed by itself: a peer's connection broke or timed out. Suspicion, not proof."""

    message: str


class CaptureSkipped(_OfWorker):
    """The worker did not capture this version: it had no free slot, or no memory for the growth in `no_memory`."""

    version: Version
    no_memory: str = ""


class StepsLimited(_OfWorkerInEpoch):
    """The worker begins no step after this version. Answers `LimitSteps`, and is repeated when the version is reached.

    Then the worker waits, and `captured` tells whether one of its slots holds the version.
    """

    version: Version
    reached: bool = False
    captured: bool = False


class LoopFinished(_OfWorker):
    """The worker has completed its last step and captured it; it waits to be released."""

    version: Version


class WorkerHung(_OfWorker):
    """The worker makes no progress, although it waits for no other rank."""

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


WorkerEvent = (
    FetchFailed
    | WorkerStarted
    | WorkerReady
    | SparePrepared
    | PrepareFailed
    | WorkerStartFailed
    | ScriptInitialized
    | SetupCompleted
    | TranscriptSealed
    | WorkerRaised
    | JobRefused
    | LoopBypassed
    | WorkerExited
    | AbortCompleted
    | AbortFailed
    | RunUnwound
    | ReplacementRehearsed
    | RankRestored
    | RankAttached
    | AttachFailed
    | FirstStepCompleted
    | CollectiveFailed
    | CaptureSkipped
    | StepsLimited
    | LoopFinished
    | WorkerHung
)
"""Events of one worker."""
Event = (
    WorkerEvent
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
