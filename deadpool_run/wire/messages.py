"""Messages between an agent and its workers, and their frames. No sockets here.

A worker reports events of the coordinator about itself. A frame is a 4-byte big-endian length and a JSON object whose `type` names the message class. File descriptors travel with the
first byte of `Assign` (in the order of its `fds`), `LendStatusPage` and `LendSlots`, and of no other message.
"""

from deadpool_run.core import events as ev
from deadpool_run.ids import Epoch, WorkerId
from deadpool_run.structs import Tagged
from deadpool_run.wire.checkpoints import FromCheckpointer, ToCheckpointer
from deadpool_run.wire.frames import MessageFormat

MAX_FRAME_BYTES = 4 << 20


# --- agent to worker ---------------------------------------------------------------------------------------------


class Assign(Tagged):
    """Gives a worker its rank. `env` is its whole environment; `fds` names the descriptors that come with the message.

    The names are `status_page`, `slot0`, `slot1`, `transcript`, and `stdout` and `stderr` where output is redirected.
    """

    rank: int
    local_rank: int
    world_size: int
    epoch: Epoch
    replacement: bool
    store_host: str
    store_port: int
    capture_interval: int
    env: dict[str, str]
    fds: tuple[str, ...] = ()
    prepare: bool = False
    """Only rehearse as this rank, ahead of need, and report `Prepared`. Status page and slots are scratch; another `Assign` follows."""
    resume: int = -1
    """The version of a durable checkpoint that slot0 holds, to resume from after set-up and a rehearsal. -1: none."""


class Abort(Tagged):
    """Orders to drain towards this epoch, as a member was lost, and to report `Drained`."""

    epoch: Epoch


class RunAgain(Tagged):
    """Orders to leave this run of the script, report `Unwound`, and run it again as a replacement.

    A worker that cannot answers `DrainBroke`. An empty `store_host`: the store has not moved.
    """

    epoch: Epoch
    store_host: str = ""
    store_port: int = 0


class Resume(Tagged):
    """Orders to bring the objects to this version and report `Restored`."""

    epoch: Epoch
    version: int


class Attach(Tagged):
    """Orders to build the communicators of this epoch and report `Attached`. An empty `store_host`: the store has not moved."""

    epoch: Epoch
    store_host: str = ""
    store_port: int = 0


class SetInterval(Tagged):
    """Orders to capture only versions that this number divides."""

    interval: int


class Release(Tagged):
    """Allows the step loop to end."""


class Dismiss(Tagged):
    """Has a parked spare exit with code 0."""


class Stop(Tagged):
    """Tells that the job ends: no further order comes. A signal to end is sent as well."""


class ExitNow(Tagged):
    """Injects a fault: the process ends at once with this exit code."""

    code: int


# --- worker to agent ---------------------------------------------------------------------------------------------

THIS_WORKER = WorkerId(-1)
"""The worker of an event that a worker reports: its own. A parked one does not know its id, and the agent fills it in."""

WorkerReport = (
    ev.WorkerReady
    | ev.SparePrepared
    | ev.PrepareFailed
    | ev.ScriptInitialized
    | ev.SetupCompleted
    | ev.TranscriptSealed
    | ev.WorkerRaised
    | ev.JobRefused
    | ev.LoopBypassed
    | ev.SurvivorDrained
    | ev.DrainFailed
    | ev.RunUnwound
    | ev.ReplacementRehearsed
    | ev.RankRestored
    | ev.RankAttached
    | ev.AttachFailed
    | ev.FirstStepCompleted
    | ev.CollectiveFailed
    | ev.CaptureSkipped
    | ev.LoopFinished
)
"""The events that a worker reports."""


class Captured(Tagged):
    """Reports that a slot holds this version complete. Sent where snapshots are replicated, to the agent only."""

    version: int


class StoreListening(Tagged):
    """Reports the port on which the store process serves."""

    port: int


ToWorker = Assign | Abort | RunAgain | Resume | Attach | SetInterval | Release | Dismiss | Stop | ExitNow
FromWorker = WorkerReport | Captured | StoreListening
Message = ToWorker | FromWorker | ToCheckpointer | FromCheckpointer

FORMAT: MessageFormat[Message] = MessageFormat(Message, "a message of an agent or a worker", MAX_FRAME_BYTES)
encode, decode = FORMAT.encode, FORMAT.decode
