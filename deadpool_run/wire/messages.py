"""What an agent and its workers say to each other, and how it becomes bytes.

A frame is a 4-byte big-endian length and that many bytes of a JSON object, whose `type` names the message class. No
sockets here. Only `Assign` (in the order of its `fds`), `LendBoard` and `LendSlots` travel with file descriptors,
attached to their first byte.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from deadpool_run.errors import ProtocolError
from deadpool_run.wire.checkpoints import (
    CheckpointFailed,
    CheckpointLoaded,
    ChooseCheckpoint,
    FillSlots,
    FromCheckpointer,
    LendBoard,
    LendSlots,
    StepTaken,
    TakeStep,
    ToCheckpointer,
)
from deadpool_run.wire.frames import Frames, pack

MAX_FRAME_BYTES = 4 << 20


# --- agent to worker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assign:
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
    fds: list[str] = field(default_factory=list)
    prepare: bool = False
    """Only rehearse as this rank, ahead of need, and report `Prepared`; status page and slots are nobody's. Another `Assign` follows."""
    resume: int = -1
    """The version that slot0 holds from before the job, to go on from after set-up and a rehearsal; -1: none."""


@dataclass(frozen=True, slots=True)
class Abort:
    """A member was lost: drain towards this epoch, then report `Drained`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Leave this run of the script, report `Unwound`, and run it again as a replacement; or say `DrainBroke` if you cannot.

    An empty `store_host`: the store is where it was.
    """

    epoch: int
    store_host: str = ""
    store_port: int = 0


@dataclass(frozen=True, slots=True)
class Resume:
    """Bring the objects to this version, then report `Restored`."""

    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class Attach:
    """Build the communicators of this epoch, then report `Attached`. An empty `store_host`: the store is where it was."""

    epoch: int
    store_host: str = ""
    store_port: int = 0


@dataclass(frozen=True, slots=True)
class SetInterval:
    """Capture only versions that this number divides."""

    interval: int


@dataclass(frozen=True, slots=True)
class Release:
    """The step loop may end."""


@dataclass(frozen=True, slots=True)
class Dismiss:
    """A parked spare exits 0."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The job ends: wait for no order any more. The signal to end comes beside it."""


@dataclass(frozen=True, slots=True)
class ExitNow:
    """An injected fault: end the process at once with this exit code."""

    code: int


# --- worker to agent ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ready:
    """Parked; a rank can be given."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Rehearsed ahead of need; a rank can be given."""


@dataclass(frozen=True, slots=True)
class PrepareBroke:
    """The script could not be rehearsed ahead of need; the exit follows."""

    message: str


@dataclass(frozen=True, slots=True)
class Initialized:
    """The script called `init()`."""


@dataclass(frozen=True, slots=True)
class SetupDone:
    """In the step loop, snapshot 0 captured."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """The transcript of set-up and the first two steps is complete. `like` is as `core.events.TranscriptSealed` has it."""

    like: int | None


@dataclass(frozen=True, slots=True)
class Raised:
    """The script ended with this exception."""

    step: int | None
    kind: str
    message: str
    traceback: str
    blame: str = "script"
    """An `errors.Blame`, as is that of `DrainBroke`."""


@dataclass(frozen=True, slots=True)
class ScriptRefused:
    """The library refuses to go on: the weights could not be kept exact. The job stops with this exit code."""

    message: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class TrainsOutsideLoop:
    """The script called `init()` and updates weights outside `job.steps()`: nothing protects it."""


@dataclass(frozen=True, slots=True)
class Drained:
    """See `core.events.SurvivorDrained`."""

    epoch: int
    completed: int
    live: int | None
    captured: list[int]


@dataclass(frozen=True, slots=True)
class DrainBroke:
    """See `core.events.DrainFailed`."""

    epoch: int
    message: str
    again: bool = False
    step: int | None = None
    kind: str = ""
    error: str = ""
    traceback: str = ""
    blame: str = "script"


@dataclass(frozen=True, slots=True)
class Unwound:
    """See `core.events.RunUnwound`."""

    completed: int
    captured: list[int]


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Set-up and two rehearsal steps are done."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The objects hold the resume version."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Attached:
    """Every communicator is attached."""

    epoch: int


@dataclass(frozen=True, slots=True)
class AttachBroke:
    """The communicators could not be built."""

    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class FirstStep:
    """The first step of this epoch is complete."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PeerSuspected:
    """A collective failed by itself."""

    epoch: int
    message: str


@dataclass(frozen=True, slots=True)
class Captured:
    """A slot holds this version complete. Said only where snapshots are replicated; no fact for the coordinator."""

    version: int


@dataclass(frozen=True, slots=True)
class Skipped:
    """No slot was free for this version."""

    version: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The last step is done and captured."""

    version: int


@dataclass(frozen=True, slots=True)
class StoreListening:
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

_TYPES: Mapping[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        *(Assign, Abort, RunAgain, Resume, Attach, SetInterval, Release, Dismiss, Stop, ExitNow),
        *(
            Ready,
            Prepared,
            PrepareBroke,
            Initialized,
            SetupDone,
            Sealed,
            Raised,
            ScriptRefused,
            TrainsOutsideLoop,
            Drained,
            DrainBroke,
            Unwound,
            Rehearsed,
            Restored,
        ),
        *(Attached, AttachBroke, FirstStep, PeerSuspected, Captured, Skipped, Finished, StoreListening),
        *(LendBoard, LendSlots, CheckpointLoaded, CheckpointFailed),
        *(ChooseCheckpoint, FillSlots, TakeStep, StepTaken),
    )
}


def encode(message: Message) -> bytes:
    """Return the message as one frame."""
    body = json.dumps({"type": type(message).__name__, **asdict(message)}, separators=(",", ":")).encode()
    return pack(body, MAX_FRAME_BYTES)


def decode(body: bytes) -> Message:
    """Return the message of one frame's body. Raises `ProtocolError` for anything that is not one."""
    try:
        parts: dict[str, Any] = json.loads(body)
        kind = _TYPES[parts.pop("type")]
        if set(parts) != {f.name for f in fields(kind)}:
            raise ProtocolError(f"a {kind.__name__} with fields {sorted(parts)}")
        return kind(**parts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"not a message of this protocol: {body[:80]!r}") from error


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
        return map(decode, self._frames.feed(data))
