"""What an agent and its workers say to each other, and how it becomes bytes.

A frame is a 4-byte big-endian length and that many bytes of a JSON object, whose `type` names the message class. No
sockets here. Only `Assign` (in the order of its `fds`), `LendBoard` and `LendSlots` travel with file descriptors,
attached to their first byte.
"""

from collections.abc import Iterator

from deadpool_run.structs import Tagged
from deadpool_run.wire import typed
from deadpool_run.wire.checkpoints import (
    FromCheckpointer,
    ToCheckpointer,
)
from deadpool_run.wire.frames import Frames, pack

MAX_FRAME_BYTES = 4 << 20


# --- agent to worker ---------------------------------------------------------------------------------------------


class Assign(Tagged):
    """Take this rank. `env` is the worker's whole environment; `fds` names the descriptors that come along.

    Names: `status_page`, `slot0`, `slot1`, `transcript`, and, where output is redirected, `stdout` and `stderr`.
    """

    rank: int
    local_rank: int
    world_size: int
    epoch: int
    replacement: bool
    store_host: str
    store_port: int
    capture_interval: int
    env: dict[str, str]
    fds: tuple[str, ...] = ()
    prepare: bool = False
    """Only rehearse as this rank, ahead of need, and report `Prepared`; status page and slots are nobody's. Another `Assign` follows."""
    resume: int = -1
    """The version that slot0 holds from before the job, to go on from after set-up and a rehearsal; -1: none."""


class Abort(Tagged):
    """A member was lost: drain towards this epoch, then report `Drained`."""

    epoch: int


class RunAgain(Tagged):
    """Leave this run of the script, report `Unwound`, and run it again as a replacement; or say `DrainBroke` if you cannot.

    An empty `store_host`: the store is where it was.
    """

    epoch: int
    store_host: str = ""
    store_port: int = 0


class Resume(Tagged):
    """Bring the objects to this version, then report `Restored`."""

    epoch: int
    version: int


class Attach(Tagged):
    """Build the communicators of this epoch, then report `Attached`. An empty `store_host`: the store is where it was."""

    epoch: int
    store_host: str = ""
    store_port: int = 0


class SetInterval(Tagged):
    """Capture only versions that this number divides."""

    interval: int


class Release(Tagged):
    """The step loop may end."""


class Dismiss(Tagged):
    """A parked spare exits 0."""


class Stop(Tagged):
    """The job ends: wait for no order any more. The signal to end comes beside it."""


class ExitNow(Tagged):
    """An injected fault: end the process at once with this exit code."""

    code: int


# --- worker to agent ---------------------------------------------------------------------------------------------


class Ready(Tagged):
    """Parked; a rank can be given."""


class Prepared(Tagged):
    """Rehearsed ahead of need; a rank can be given."""


class PrepareBroke(Tagged):
    """The script could not be rehearsed ahead of need; the exit follows."""

    message: str


class Initialized(Tagged):
    """The script called `init()`."""


class SetupDone(Tagged):
    """In the step loop, snapshot 0 captured."""


class Sealed(Tagged):
    """The transcript of set-up and the first two steps is complete. `like` is as `core.events.TranscriptSealed` has it."""

    like: int | None


class Raised(Tagged):
    """The script ended with this exception."""

    step: int | None
    kind: str
    message: str
    traceback: str
    blame: str = "script"
    """An `errors.Blame`, as is that of `DrainBroke`."""


class ScriptRefused(Tagged):
    """The library refuses to go on: the weights could not be kept exact. The job stops with this exit code."""

    message: str
    exit_code: int


class TrainsOutsideLoop(Tagged):
    """The script called `init()` and updates weights outside `job.steps()`: nothing protects it."""


class Drained(Tagged):
    """See `core.events.SurvivorDrained`."""

    epoch: int
    completed: int
    live: int | None
    captured: list[int]


class DrainBroke(Tagged):
    """See `core.events.DrainFailed`."""

    epoch: int
    message: str
    again: bool = False
    step: int | None = None
    kind: str = ""
    error: str = ""
    traceback: str = ""
    blame: str = "script"


class Unwound(Tagged):
    """See `core.events.RunUnwound`."""

    completed: int
    captured: list[int]


class Rehearsed(Tagged):
    """Set-up and two rehearsal steps are done."""

    epoch: int


class Restored(Tagged):
    """The objects hold the resume version."""

    epoch: int


class Attached(Tagged):
    """Every communicator is attached."""

    epoch: int


class AttachBroke(Tagged):
    """The communicators could not be built."""

    epoch: int
    message: str


class FirstStep(Tagged):
    """The first step of this epoch is complete."""

    epoch: int


class PeerSuspected(Tagged):
    """A collective failed by itself."""

    epoch: int
    message: str


class Captured(Tagged):
    """A slot holds this version complete. Said only where snapshots are replicated; no fact for the coordinator."""

    version: int


class Skipped(Tagged):
    """No slot was free for this version."""

    version: int


class Finished(Tagged):
    """The last step is done and captured."""

    version: int


class StoreListening(Tagged):
    """The store process serves on this port."""

    port: int


ToWorker = Assign | Abort | RunAgain | Resume | Attach | SetInterval | Release | Dismiss | Stop | ExitNow
FromWorker = (
    Ready
    | Prepared
    | PrepareBroke
    | Initialized
    | SetupDone
    | Sealed
    | Raised
    | ScriptRefused
    | TrainsOutsideLoop
    | Drained
    | DrainBroke
    | Unwound
    | Rehearsed
    | Restored
    | Attached
    | AttachBroke
    | FirstStep
    | PeerSuspected
    | Captured
    | Skipped
    | Finished
    | StoreListening
)
Message = ToWorker | FromWorker | ToCheckpointer | FromCheckpointer

_DECODER: typed.Decoder[Message] = typed.Decoder(Message, "a message of an agent or a worker")


def encode(message: Message) -> bytes:
    """Return the message as one frame."""
    return pack(typed.to_json(message), MAX_FRAME_BYTES)


def decode(body: bytes) -> Message:
    """Return the message of one frame's body. Raises `ProtocolError` for anything that is not one."""
    return _DECODER.decode(body)


class FrameBuffer:
    """Cuts a byte stream into messages. Holds at most one frame and one read beyond it."""

    def __init__(self) -> None:
        self._frames = Frames(MAX_FRAME_BYTES)

    @property
    def missing(self) -> int:
        """Bytes to read until the frame in hand is complete (or its length is known); never 0."""
        return self._frames.missing

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield every message that is complete with `data`. Raises `ProtocolError`."""
        return map(_DECODER.decode, self._frames.feed(data))
