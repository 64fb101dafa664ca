"""Orders that the coordinator gives, in the imperative. Closed union: `Effect`.

An order names the worker (one process life), so that performing it late can never reach another process.
"""

from dataclasses import dataclass

from deadpool_run.core.injection import KillHow
from deadpool_run.ids import Epoch, NodeId, Rank, Version, WorkerId


@dataclass(frozen=True, slots=True)
class BeginGeneration:
    """The world starts from the top: forget every snapshot and transcript, open a fresh store.

    `generation` counts these from 0; it is the TORCHELASTIC_RESTART_COUNT of the workers assigned after it.
    """

    generation: int


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Make a process on this node that parks until it is given a rank."""

    worker: WorkerId
    node: NodeId


@dataclass(frozen=True, slots=True)
class AssignRank:
    """Give the worker this rank. A replacement rehearses and is restored; any other sets up for real with its peers.

    `transcript_from` is the node that the rank's transcript is brought from; None if the worker's own node has it.
    """

    worker: WorkerId
    rank: Rank
    epoch: Epoch
    replacement: bool
    local_rank: int
    transcript_from: NodeId | None = None


@dataclass(frozen=True, slots=True)
class PrepareSpare:
    """Have a parked spare rehearse as this rank of its node ahead of need, then report `SparePrepared`."""

    worker: WorkerId
    rank: Rank
    epoch: Epoch
    local_rank: int


@dataclass(frozen=True, slots=True)
class AbortStep:
    """Free the member from the collectives it hangs in and have it drain towards this epoch."""

    worker: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class ReEnter:
    """Leave the run of the script that cannot be drained, report `RunUnwound`, and run it again as a replacement."""

    worker: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class ResumeFrom:
    """Bring the member's objects to this version, then report `RankRestored`.

    `source` is the node that the snapshot is brought from first; None if the member or its node holds it.
    """

    worker: WorkerId
    epoch: Epoch
    version: Version
    source: NodeId | None = None


@dataclass(frozen=True, slots=True)
class SetBuddies:
    """From now on, each rank's snapshots and transcript are copied to these nodes. One entry for each rank."""

    buddies: tuple[tuple[NodeId, ...], ...]


@dataclass(frozen=True, slots=True)
class ReportReplicas:
    """Say what the node holds of a rank whose own node is lost."""

    node: NodeId
    rank: Rank
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class DiscardAbove:
    """Copies of versions above this one, made in an older epoch, are of a life that did not happen: forget them."""

    epoch: Epoch
    version: Version


@dataclass(frozen=True, slots=True)
class AttachGroups:
    """Build the member's communicators afresh for this epoch, then report `RankAttached` and go on."""

    worker: WorkerId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class SetCaptureInterval:
    """Capture only versions that this number divides."""

    worker: WorkerId
    interval: int


@dataclass(frozen=True, slots=True)
class ReleaseWorker:
    """Every rank's last snapshot is committed: the worker may leave its step loop."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class DismissWorker:
    """The parked spare is not needed any more: it exits 0."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End the worker at once. `injected` marks a fault that a user asked for."""

    worker: WorkerId
    how: KillHow
    reason: str
    injected: bool = False


@dataclass(frozen=True, slots=True)
class TerminateWorker:
    """End the worker's process group: the signal (SIGTERM unless a user's own is passed on), then SIGKILL."""

    worker: WorkerId
    signal: int
    grace_s: float


@dataclass(frozen=True, slots=True)
class Loss:
    """One rank's loss and its replacement, as part of an incident."""

    rank: Rank
    worker: WorkerId
    cause: str
    injected: bool
    replacement: WorkerId
    from_spare: bool


@dataclass(frozen=True, slots=True)
class Incident:
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


@dataclass(frozen=True, slots=True)
class ReportIncident:
    """Tell the user, on one line, of a repair that is over."""

    incident: Incident


@dataclass(frozen=True, slots=True)
class Announce:
    """Tell the user something that happened or was decided; `reason` says why."""

    what: str
    reason: str
    ours: bool = False
    """It is an error of deadpool-run: the user is asked to report it, with what."""


@dataclass(frozen=True, slots=True)
class StopJob:
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
    | KillWorker
    | TerminateWorker
    | ReportIncident
    | Announce
    | StopJob
)
