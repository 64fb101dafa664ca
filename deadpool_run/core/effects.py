"""Orders of the coordinator, in the imperative. Closed union: `Effect`.

An order names the worker, which is one life of one process. So a late order never reaches another process.
"""

from deadpool_run.core.injection import KillHow
from deadpool_run.ids import Epoch, NodeId, Rank, Version, WorkerId
from deadpool_run.structs import Tagged, Untagged


class _ToWorker(Tagged):
    """An order that concerns one worker."""

    worker: WorkerId


class BeginGeneration(Tagged):
    """The world starts from the top: forget every snapshot and transcript, open a fresh store.

    `generation` counts these from 0; it is the TORCHELASTIC_RESTART_COUNT of the workers assigned after it.
    """

    generation: int


class StartWorker(_ToWorker):
    """Make a process on this node that parks until it is given a rank."""

    node: NodeId


class AssignRank(_ToWorker):
    """Give the worker this rank. A replacement rehearses and is restored; any other worker sets up with its peers.

    `transcript_from` is the node to fetch the rank's transcript from; None if the worker's own node has it.
    """

    rank: Rank
    epoch: Epoch
    replacement: bool
    local_rank: int
    transcript_from: NodeId | None = None


class PrepareSpare(_ToWorker):
    """Let a parked spare rehearse as this rank during training, then report `SparePrepared`.

    `transcript_from` is the rank's node, where the spare's own node has no ranks; else None.
    """

    rank: Rank
    epoch: Epoch
    local_rank: int
    transcript_from: NodeId | None = None


class AbortStep(_ToWorker):
    """Abort the member's collectives, let its step run to its end, and enter this epoch."""

    epoch: Epoch


class ReEnter(_ToWorker):
    """Leave the run of the script whose step cannot be aborted, report `RunUnwound`, and run it again as a replacement."""

    epoch: Epoch


class ResumeFrom(_ToWorker):
    """Bring the member's objects to this version, then report `RankRestored`.

    `source` is the node to fetch the snapshot from; None if the member or its node holds it.
    """

    epoch: Epoch
    version: Version
    source: NodeId | None = None


class SetBuddies(Tagged):
    """Copy each rank's snapshots and transcript to these nodes from now on. One entry for each rank.

    Of ranks in `groups`, the nodes keep one parity of the snapshots for all ranks of the group.
    """

    buddies: tuple[tuple[NodeId, ...], ...]
    groups: tuple[tuple[Rank, ...], ...] = ()


class ReportReplicas(Tagged):
    """Report the node's transcript and versions of a rank whose own node is lost."""

    node: NodeId
    rank: Rank
    epoch: Epoch


class DiscardAbove(Tagged):
    """Forget copies of versions above this one that were made in an older epoch: the job did not continue from them."""

    epoch: Epoch
    version: Version


class ReleaseNode(Tagged):
    """Let a drained node leave the job: it has no rank, and no needed copy."""

    node: NodeId


class AttachGroups(_ToWorker):
    """Build the member's communicators for this epoch, then report `RankAttached` and continue."""

    epoch: Epoch


class SetCaptureInterval(_ToWorker):
    """Capture only versions that this number divides."""

    interval: int


class LimitSteps(_ToWorker):
    """Begin no step after this version, or after the first later version that is possible. None removes the limit.

    A newer epoch ends the limit too.
    """

    epoch: Epoch
    version: Version | None


class ReleaseWorker(_ToWorker):
    """Let the worker leave its step loop, because every rank's last snapshot is committed."""


class DismissWorker(_ToWorker):
    """Let a parked spare exit with code 0."""


class AbandonWorker(_ToWorker):
    """Report a killed worker that does not end as ended, and stop waiting for it."""


class KillWorker(_ToWorker):
    """End the worker at once. `injected` marks a fault that a user asked for."""

    how: KillHow
    reason: str
    injected: bool = False


class SlowWorker(_ToWorker):
    """Slow the worker for a time: a fault that a user asked for. Its end, or a signal that stops it, ends that."""

    factor: float
    for_s: float


class KillAgent(Tagged):
    """End the node's agent at once: a fault that a user asked for. The node is lost, with its workers."""

    node: NodeId


class TerminateWorker(_ToWorker):
    """End the worker's process group with this signal (SIGTERM, or a user's signal that is passed on), then SIGKILL."""

    signal: int
    grace_s: float


class Loss(Untagged):
    """The loss of one rank, and its replacement; None while it has none. `planned`: the rank was drained."""

    rank: Rank
    worker: WorkerId
    cause: str
    injected: bool
    replacement: WorkerId | None = None
    from_spare: bool = False
    planned: bool = False


PHASES = ("detected", "promoted", "aborted", "rehearsed", "restored", "attached", "first_step")
"""The parts of a repair, in their usual order. `Incident` has the time of each."""


class Incident(Untagged):
    """A finished repair. Times are in seconds after the loss was known. Only injected faults have `detected_s`."""

    epoch: Epoch
    losses: tuple[Loss, ...]
    resumed: Version
    steps_repeated: int
    detected_s: float | None
    aborted_s: float
    promoted_s: float
    rehearsed_s: float
    restored_s: float
    attached_s: float
    first_step_s: float
    reentered: tuple[Rank, ...] = ()
    """Ranks whose workers could not abort their step, and ran their script again."""

    exposed_s: float | None = None
    """From the loss of a node until every rank had all its copies again. None: not yet, or no node was lost."""

    @property
    def planned(self) -> bool:
        """Whether nothing was lost: the ranks were drained."""
        return bool(self.losses) and all(loss.planned for loss in self.losses) and not self.steps_repeated


class ReportIncident(Tagged):
    """Report a finished repair to the user, in one line."""

    incident: Incident


class Announce(Tagged):
    """Tell the user what happened or was decided, and why."""

    what: str
    reason: str
    ours: bool = False
    """It is an error of deadpool-run: the user is asked to report it, with versions and the journal."""
    detail: bool = False
    """It is part of a repair that gets a line of its own: printed with --verbose."""


class StopJob(Tagged):
    """End the job with this exit code: every worker is gone."""

    exit_code: int
    reason: str


MemberOrder = (
    AssignRank
    | PrepareSpare
    | AbortStep
    | ReEnter
    | ResumeFrom
    | AttachGroups
    | ReleaseWorker
    | DismissWorker
    | AbandonWorker
    | KillWorker
    | TerminateWorker
)
"""Orders that move a member to another phase."""
Effect = (
    MemberOrder
    | BeginGeneration
    | StartWorker
    | SetBuddies
    | ReportReplicas
    | DiscardAbove
    | SetCaptureInterval
    | LimitSteps
    | ReleaseNode
    | SlowWorker
    | KillAgent
    | ReportIncident
    | Announce
    | StopJob
)
