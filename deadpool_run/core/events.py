"""Facts that the coordinator is told, in the past tense. Closed union: `Event`."""

from deadpool_run.core.injection import KillHow
from deadpool_run.errors import Blame
from deadpool_run.ids import ONLY_NODE, Epoch, NodeId, Rank, Version, WorkerId
from deadpool_run.structs import Tagged, Untagged

_NO_EPOCH = Epoch(0)


class Place(Untagged):
    """Where a node is. `failure_domain` names what it shares with its neighbours (a switch); empty if that is not known.

    `order` is the user's or the scheduler's place for it among the nodes; None if arrival decides.
    """

    name: str = "localhost"
    address: str = "127.0.0.1"
    port: int = 0
    failure_domain: str = ""
    order: int | None = None


class JobSubmitted(Tagged):
    """The first agent is up and asks for workers: its node joins. Always the first event."""

    node: NodeId = ONLY_NODE
    place: Place = Place()


class NodeJoined(Tagged):
    """A further agent is up, at the start or later. Its node has no workers yet."""

    node: NodeId
    place: Place


class NodeLost(Tagged):
    """The node's agent ended, is silent or was fenced: its workers count as dead, and its vault as gone."""

    node: NodeId
    reason: str


class NodesLost(Tagged):
    """These were found to be lost together (a switch or a rack is gone): one loss, and one repair."""

    losses: tuple[NodeLost, ...]


class CoordinatorMoved(Tagged):
    """This state machine runs on another node from now on, in a larger term.

    What the last one did after the entry that was followed last is not known: each node's agent says what is there
    (`NodeResynced`).
    """

    term: int
    node: NodeId


class WorkerFound(Untagged):
    """What an agent knows of one worker, whoever ordered it. Exactly one of `code` and `signal` is set once it ended.

    `rank` is the one that it was given, -1 if none, and `epoch` that of the order that gave it.
    """

    worker: WorkerId
    pid: int
    rank: int = -1
    epoch: Epoch = _NO_EPOCH
    ready: bool = False
    initialized: bool = False
    """Its script called `init()`."""
    rehearsed: bool = False
    """It has said `ReplacementRehearsed`: what it sets up is made, and it needs the store of that time no more."""
    reentering: bool = False
    """It was told to run its script again (`rehearsed` is of that run), and has not said `RankRestored` since."""
    finished: bool = False
    """It has said `LoopFinished`, and was not told to drain since."""
    released: bool = False
    """It was told to leave its loop."""
    dismissed: bool = False
    """It holds no rank, and was told to exit."""
    code: int | None = None
    signal: int | None = None

    @property
    def alive(self) -> bool:
        """Tell whether the process exists."""
        return self.code is None and self.signal is None


class NodeResynced(Tagged):
    """Told once by each node's agent after the coordinator moved: every worker of this generation that was started there.

    `discarded` are the epoch and the version of the last `DiscardAbove` that the node knows of.
    """

    node: NodeId
    workers: tuple[WorkerFound, ...]
    discarded: tuple[Epoch, Version] = (_NO_EPOCH, Version(-1))


class SnapshotCommitted(Tagged):
    """Every rank's snapshot and transcript lie on as many other nodes as they should.

    Told once in a generation, and once after each loss of a node.
    """

    version: Version
    epoch: Epoch


class ReplicasReported(Tagged):
    """The node holds these versions of the rank complete, and its transcript; the answer to `ReportReplicas`."""

    node: NodeId
    rank: Rank
    epoch: Epoch
    versions: tuple[Version, ...]


class FetchFailed(Tagged):
    """What the replacement needs could not be brought to its node from this one."""

    worker: WorkerId
    epoch: Epoch
    source: NodeId
    message: str


class WorkerStarted(Tagged):
    """A process exists for this worker."""

    worker: WorkerId
    pid: int


class WorkerReady(Tagged):
    """The worker has imported what it needs and is parked: it can be given a rank at once."""

    worker: WorkerId


class SparePrepared(Tagged):
    """The spare has rehearsed as it was ordered, and waits for a rank: best for that one."""

    worker: WorkerId


class PrepareFailed(Tagged):
    """The script could not be rehearsed ahead of need; the spare ends."""

    worker: WorkerId
    message: str


class WorkerStartFailed(Tagged):
    """No process could be made for this worker."""

    worker: WorkerId
    reason: str


class ScriptInitialized(Tagged):
    """The worker's script called `init()`: its step can be interrupted and repaired (a *managed* worker)."""

    worker: WorkerId


class SetupCompleted(Tagged):
    """The worker entered its step loop and captured snapshot 0."""

    worker: WorkerId


class TranscriptSealed(Tagged):
    """Set-up and the first two steps of this worker's rank can be rehearsed by a replacement from now on.

    `like` is the lowest of the ranks that hold the same parameters as this one; None if it is the only one.
    """

    worker: WorkerId
    like: Rank | None = None


class WorkerRaised(Tagged):
    """The worker's script ended with an exception; its exit follows. `step` is None outside the step loop."""

    worker: WorkerId
    step: int | None
    kind: str
    message: str
    traceback: str
    blame: Blame = Blame.SCRIPT


class JobRefused(Tagged):
    """The library in this worker cannot keep the weights exact, or cannot work with this script: the job is to end."""

    worker: WorkerId
    message: str
    exit_code: int


class LoopBypassed(Tagged):
    """The worker's script called `init()`, and updates weights outside `job.steps()`: no snapshot has them."""

    worker: WorkerId


class WorkerExited(Tagged):
    """The worker's process ended and was reaped. Exactly one of `code` and `signal` is set.

    `captured` are the versions that its vault slots hold complete, read after its death.
    """

    worker: WorkerId
    code: int | None
    signal: int | None
    captured: tuple[Version, ...] = ()


class SurvivorDrained(Tagged):
    """The worker has let its interrupted step run to its end and waits.

    `live` is the version that its objects hold now; None if they hold no version (interrupted among optimizers), so
    that it can only go on from one of `captured`. `completed` is the number of steps it had completed.
    """

    worker: WorkerId
    epoch: Epoch
    completed: Version
    live: Version | None
    captured: tuple[Version, ...]


class DrainFailed(Tagged):
    """The worker's script raised while its step was drained, so that its objects may be half-way: it cannot go on.

    `again`: it can run its script again from the top, and waits to be told.
    """

    worker: WorkerId
    epoch: Epoch
    message: str
    again: bool = False
    step: int | None = None
    kind: str = ""
    """Of the exception, as are the next three; empty if it was none."""
    error: str = ""
    traceback: str = ""
    blame: Blame = Blame.SCRIPT


class RunUnwound(Tagged):
    """The worker has left the run of its script that could not be drained, and runs it again from the top: a replacement.

    `captured` are the versions that its slots hold, `completed` the steps it had completed. True in any epoch: nothing
    is captured before the rank has its state again.
    """

    worker: WorkerId
    completed: Version
    captured: tuple[Version, ...]


class ReplacementRehearsed(Tagged):
    """The replacement has run set-up and its two rehearsal steps."""

    worker: WorkerId
    epoch: Epoch


class RankRestored(Tagged):
    """The member's objects hold the resume version; it can attach."""

    worker: WorkerId
    epoch: Epoch


class RankAttached(Tagged):
    """Every communicator of the member is attached to the epoch."""

    worker: WorkerId
    epoch: Epoch


class AttachFailed(Tagged):
    """The member could not build its communicators for the epoch (a peer may have died meanwhile)."""

    worker: WorkerId
    epoch: Epoch
    message: str


class FirstStepCompleted(Tagged):
    """The member has completed its first step since it attached to the epoch."""

    worker: WorkerId
    epoch: Epoch


class CollectiveFailed(Tagged):
    """A collective of the member failed by itself: a peer's connection broke or timed out. Suspicion, not proof."""

    worker: WorkerId
    epoch: Epoch
    message: str


class CaptureSkipped(Tagged):
    """The worker had no free slot for this version."""

    worker: WorkerId
    version: Version


class LoopFinished(Tagged):
    """The worker has completed its last step and captured it; it waits to be released."""

    worker: WorkerId
    version: Version


class WorkerHung(Tagged):
    """The worker makes no progress although nothing that it waits for is missing."""

    worker: WorkerId
    reason: str


class KillRequested(Tagged):
    """A user injects a fault."""

    rank: Rank
    how: KillHow


class StopRequested(Tagged):
    """A user or the system asks the whole job to end (signal number, or 0 if asked otherwise)."""

    signal: int
    exit_code: int = 1
    """What it is to end with: whoever leads by then may not know why it was asked."""


class TimeAdvanced(Tagged):
    """A deadline that the state offered has been reached."""


Event = (
    JobSubmitted
    | NodeJoined
    | NodeLost
    | NodesLost
    | CoordinatorMoved
    | NodeResynced
    | SnapshotCommitted
    | ReplicasReported
    | FetchFailed
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
    | SurvivorDrained
    | DrainFailed
    | RunUnwound
    | ReplacementRehearsed
    | RankRestored
    | RankAttached
    | AttachFailed
    | FirstStepCompleted
    | CollectiveFailed
    | CaptureSkipped
    | LoopFinished
    | WorkerHung
    | KillRequested
    | StopRequested
    | TimeAdvanced
)
