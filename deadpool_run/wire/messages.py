"""Messages between an agent and its workers, and their frames. No sockets here.

Most orders are effects of the coordinator, and most reports its events, of which the worker is the subject.

A frame is a 4-byte big-endian length and a JSON object whose `type` names the message class. File descriptors travel with the
first byte of `Assign` (in the order of its `fds`), `LendStatusPage` and `LendSlots`, and of no other message.
"""

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.ids import Epoch, WorkerId
from deadpool_run.structs import Tagged
from deadpool_run.wire.checkpoints import FromCheckpointer, ToCheckpointer
from deadpool_run.wire.frames import MessageFormat
from deadpool_run.wire.stores import FromStore, ToStore

MAX_FRAME_BYTES = 4 << 20


# --- agent to worker ---------------------------------------------------------------------------------------------


class Assign(Tagged):
    """Gives a worker its rank. `env` is its whole environment; `fds` names the descriptors that come with the message.

    The names are `status_page`, `slot0`, `slot1`, `transcript`, and `stdout` and `stderr` where output is redirected.
    """

    rank: int
    local_rank: int
    epoch: Epoch
    env: dict[str, str]
    fds: tuple[str, ...] = ()
    prepare: bool = False
    """Only rehearse as this rank, ahead of need, and report `SparePrepared`. Status page and slots are scratch; another `Assign` follows."""


class RunAgain(Tagged):
    """Orders to leave this run of the script, report `RunUnwound`, and run it again as a replacement.

    A worker that cannot answers `AbortFailed`. An empty `store_host`: the store has not moved.
    """

    epoch: Epoch
    store_host: str = ""
    store_port: int = 0


class Attach(Tagged):
    """Orders to build the communicators of this epoch and report `RankAttached`. An empty `store_host`: the store has not moved."""

    epoch: Epoch
    store_host: str = ""
    store_port: int = 0


class Dismiss(Tagged):
    """Has a parked spare exit with code 0."""


class Stop(Tagged):
    """Tells that the job ends: no further order comes. A signal to end is sent as well."""


class ExitNow(Tagged):
    """Injects a fault: the process ends at once with this exit code."""

    code: int


class HangNow(Tagged):
    """Injects a fault: the process keeps Python's interpreter, and does nothing more."""


class OutOfMemoryNow(Tagged):
    """Injects a fault: the main thread gets `torch.OutOfMemoryError`. For workers with a rank."""


# --- worker to agent ---------------------------------------------------------------------------------------------

THIS_WORKER = WorkerId(-1)
"""The worker of an event that a worker reports: its own. A parked one does not know its id, and the agent fills it in."""

WorkerReport = (
    ev.WorkerReady
    | ev.SparePrepared
    | ev.PrepareFailed
    | ev.ScriptInitialized
    | ev.SetupCompleted
    | ev.TranscriptCompleted
    | ev.WorkerRaised
    | ev.JobRefused
    | ev.LoopBypassed
    | ev.AbortCompleted
    | ev.AbortFailed
    | ev.RunUnwound
    | ev.ReplacementRehearsed
    | ev.RankRestored
    | ev.RankAttached
    | ev.AttachFailed
    | ev.FirstStepCompleted
    | ev.CollectiveFailed
    | ev.CaptureSkipped
    | ev.StepsLimited
    | ev.LoopFinished
)
"""The events that a worker reports."""


class Captured(Tagged):
    """Reports that a slot holds this version complete. Sent where snapshots are replicated, to the agent only."""

    version: int


class ScriptTraceback(Tagged):
    """The traceback of the script's exception, for the console. The agent prints it once, whichever ranks raised it."""

    text: str


ToWorker = (
    Assign
    | do.AbortStep
    | RunAgain
    | do.ResumeFrom
    | Attach
    | do.SetCaptureInterval
    | do.LimitSteps
    | do.ReleaseWorker
    | Dismiss
    | Stop
    | ExitNow
    | HangNow
    | OutOfMemoryNow
)
FromWorker = WorkerReport | Captured | ScriptTraceback
Message = ToWorker | FromWorker | ToCheckpointer | FromCheckpointer | ToStore | FromStore

FORMAT: MessageFormat[Message] = MessageFormat(Message, "a message of an agent or a worker", MAX_FRAME_BYTES)
encode, decode = FORMAT.encode, FORMAT.decode
