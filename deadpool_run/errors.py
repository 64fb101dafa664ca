"""All exceptions of deadpool-run and their exit codes, by who is to blame.

The first line of a message says what is wrong and where, the last line what to do.
"""

from collections.abc import Sequence
from enum import StrEnum

from deadpool_run.ids import Rank


class Blame(StrEnum):
    """The cause of an exception that ended a script."""

    SCRIPT = "script"
    OURS = "deadpool-run"
    NOBODY = "nobody"
    """The network or the machine failed, or a user injected the fault."""
    DEVICE = "device"
    """The GPU failed: what runs on another one may succeed."""


class DeadpoolError(Exception):
    """Base of every exception that deadpool-run raises on purpose."""

    exit_code = 1


class UsageError(DeadpoolError):
    """The command line, an environment variable or a configuration file asks for something impossible."""

    exit_code = 2


class AuthorityError(DeadpoolError):
    """The external authority of a run cannot be asked, or its record of the run cannot be read."""


class MachineError(DeadpoolError):
    """This machine can take no part in the job any more. Others can."""


class NoSuchRunError(DeadpoolError):
    """No live run was found where the user pointed."""

    exit_code = 4


class RequestRefusedError(DeadpoolError):
    """A valid request does not fit the run as it is. The text is the reason."""


class ScriptError(DeadpoolError):
    """The training script misused the library."""


class RehearsalError(ScriptError):
    """A replacement's rehearsal did not make everything that set-up and the first steps make."""


class RefusedError(ScriptError):
    """The job stopped before any damage, because a repair could not give exact weights."""

    exit_code = 94
    reported = False
    """Whether the launcher has the message already, so that nothing prints it again."""


class ReplicasDifferError(RefusedError):
    """Replicas that were equal before a repair differ after it."""

    exit_code = 95


class InterruptedUpdateError(DeadpoolError):
    """An exception left an optimizer's step halfway, and the script caught it. The rank is replaced."""


class StepAborted(DeadpoolError):  # noqa: N818 - an interruption, not an error: `with step:` swallows it
    """A peer was lost during this step. Raised by `optimizer.step()`, swallowed by `with step:`."""


class PeerLostError(DeadpoolError):
    """A peer was lost, and the result of a collective with it. Only collectives that belong to no running step raise it."""


class RunLeft(BaseException):
    """Unwinds this run of the script, to run it again from the top. `except Exception` does not catch it."""


class ProtocolError(DeadpoolError):
    """A peer violated the protocol, or has another version of it."""

    exit_code = 90


class TamperedError(ProtocolError):
    """A frame is not what the peer sent in its turn: something between the two changed it. The peer is not to blame."""


class SnapshotError(DeadpoolError):
    """A snapshot is missing, incomplete, or does not match the objects to restore."""

    exit_code = 91


class NoMemoryError(SnapshotError):
    """There is no memory for a snapshot. The job goes on without it."""


class AttachError(DeadpoolError):
    """A communicator could not be connected in this epoch."""

    exit_code = 92

    def __init__(self, message: str, unreached: Sequence[Rank] = ()) -> None:
        """`unreached` are the ranks that were waited for in vain, or cannot be connected to, as far as that is known."""
        super().__init__(message)
        self.unreached = tuple(unreached)


class MissingGroupError(AttachError):
    """A member has no group of which it is a member: another attempt to connect ends in the same way."""


class CheckpointError(DeadpoolError):
    """A durable checkpoint cannot be written, is incomplete or damaged, or does not fit this job."""

    exit_code = 93


class VersionGoneError(CheckpointError):
    """Not every rank still holds the version to write."""
