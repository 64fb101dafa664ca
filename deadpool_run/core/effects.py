"""Orders that the coordinator gives, in the imperative. Closed union: `Effect`.

An order names the worker (one process life), so that performing it late can never reach another process.
"""

from deadpool_run.core.injection import KillHow
from deadpool_run.ids import Epoch, NodeId, Rank, Version, WorkerId
from deadpool_run.structs import Tagged, Untagged


class BeginGeneration(Tagged):
    """The world starts from the top: forget every snapshot and transcript, open a fresh store.

    `generation` counts these from 0; it is the TORCHELASTIC_RESTART_COUNT of the workers assigned after it.
    """

    generation: int


class StartWorker(Tagged):
    """Make a process on this node that parks until it is given a rank."""

    worker: WorkerId
    node: NodeId


class AssignRank(Tagged):
    """Give the worker this rank. A replacement rehearses and is restored; any other sets up for real with its peers.

    `transcript_from` is the node that the rank's transcript is brought from; None if the worker's own node has it.
    """

    worker: WorkerId
    rank: Rank
    epoch: Epoch
    replacement: bool
    local_rank: int
    transcript_from: NodeId | None = None


class PrepareSpare(Tagged):
    """Have a parked spare rehearse as this rank of its node ahead of need, then report `SparePrepared`."""

    worker: WorkerId
    rank: Rank
    epoch: Epoch
    local_rank: int


class AbortStep(Tagged):
    """Free the member from the collectives it hangs in and have it drain towards this epoch."""

    worker: WorkerId
    epoch: Epoch


class ReEnter(Tagged):
    """Leave the run of the script that cannot be drained, report `RunUnwound`, and run it again as a replacement."""

    worker: WorkerId
    epoch: Epoch


class ResumeFrom(Tagged):
    """Bring the member's objects to this version, then report `RankRestored`.

    `source` is the node that the snapshot is brought from first; None if the member or its node holds it.
    """

    worker: WorkerId
    epoch: Epoch
    version: Version
    source: NodeId | None = None


class SetBuddies(Tagged):
    """From now on, each rank's snapshots and transcript are copied to these nodes. One entry for each rank."""

    buddies: tuple[tuple[NodeId, ...], ...]


class ReportReplicas(Tagged):
    """Say what the node holds of a rank whose own node is lost."""

    node: NodeId
    rank: Rank
    epoch: Epoch


class DiscardAbove(Tagged):
    """Copies of versions above this one, made in an older epoch, are of a life that did not happen: forget them."""

    epoch: Epoch
    version: Version


class AttachGroups(Tagged):
    """Build the member's communicators afresh for this epoch, then report `RankAttached` and go on."""

    worker: WorkerId
    epoch: Epoch


class SetCaptureInterval(Tagged):
    """Capture only versions that this number divides."""

    worker: WorkerId
    interval: int


class ReleaseWorker(Tagged):
    """Every rank's last snapshot is committed: the worker may leave its step loop."""

    worker: WorkerId


class DismissWorker(Tagged):
    """The parked spare is not needed any more: it exits 0."""

    worker: WorkerId


class AbandonWorker(Tagged):
    """Take the worker for dead: it was killed, and does not end. The node reports its end at once, and waits no longer."""

    worker: WorkerId


class KillWorker(Tagged):
    """End the worker at once. `injected` marks a fault that a user asked for."""

    worker: WorkerId
    how: KillHow
    reason: str
    injected: bool = False


class TerminateWorker(Tagged):
    """End the worker's process group: the signal (SIGTERM unless a user's own is passed on), then SIGKILL."""

    worker: WorkerId
    signal: int
    grace_s: float


class Loss(Untagged):
    """One rank's loss and its replacement, as part of an incident."""

    rank: Rank
    worker: WorkerId
    cause: str
    injected: bool
    replacement: WorkerId
    from_spare: bool


class Incident(Untagged):
    """A finished repair. Times are seconds after the loss was known; `detected_s` is known for injected faults only."""

    epoch: Epoch
    losses: tuple[Loss, ...]
    resumed: Version
    steps_repeated: int
    detected_s: float | None
    drained_s: float
    promoted_s: float
    rehearsed_s: float
    restored_s: float
    attached_s: float
    first_step_s: float
    reentered: tuple[Rank, ...] = ()
    """Ranks whose workers could not be drained, and ran their script again."""
    exposed_s: float | None = None
    """After the loss of a node: until every rank had its full number of copies again. None: not yet, or no node was lost."""


class ReportIncident(Tagged):
    """Tell the user, on one line, of a repair that is over."""

    incident: Incident


class Announce(Tagged):
    """Tell the user something that happened or was decided; `reason` says why."""

    what: str
    reason: str
    ours: bool = False
    """It is an error of deadpool-run: the user is asked to report it, with what."""


class StopJob(Tagged):
    """Every worker is gone: the job ends with this exit code."""

    exit_code: int
    reason: str


Effect = (
    BeginGeneration
    | StartWorker
    | AssignRank
    | PrepareSpare
    | AbortStep
    | ReEnter
    | ResumeFrom
    | SetBuddies
    | ReportReplicas
    | DiscardAbove
    | AttachGroups
    | SetCaptureInterval
    | ReleaseWorker
    | DismissWorker
    | AbandonWorker
    | KillWorker
    | TerminateWorker
    | ReportIncident
    | Announce
    | StopJob
)
