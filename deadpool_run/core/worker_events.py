"""Events of one worker: facts that it, or the agent that started it, reports to the coordinator. Closed union: `WorkerEvent`."""

from deadpool_run.errors import Blame
from deadpool_run.ids import Epoch, NodeId, Rank, Version, WorkerId
from deadpool_run.structs import Tagged


class _OfWorker(Tagged):
    """An event of one worker."""

    worker: WorkerId


class _OfWorkerInEpoch(_OfWorker):
    """An event of one worker that counts in this epoch only."""

    epoch: Epoch


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


class TranscriptCompleted(_OfWorker):
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
    """The member could not build its communicators for the epoch (a peer may have died meanwhile).

    `unreached` are the ranks that did not come to the rendezvous, or that it cannot connect to.
    """

    message: str
    unreached: tuple[Rank, ...] = ()


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


WorkerEvent = (
    FetchFailed
    | WorkerStarted
    | WorkerReady
    | SparePrepared
    | PrepareFailed
    | WorkerStartFailed
    | ScriptInitialized
    | SetupCompleted
    | TranscriptCompleted
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
