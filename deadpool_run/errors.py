"""Every exception of deadpool-run, split by who is to blame, each with its exit code.

The first line of a message says what is wrong and where; the last says what to do.
"""

from enum import StrEnum


class Blame(StrEnum):
    """Whose fault an exception is that ended a script."""

    SCRIPT = "script"
    OURS = "deadpool-run"
    NOBODY = "nobody"
    """The network or the machine failed, and our code noticed."""


class DeadpoolError(Exception):
    """Base of every exception that deadpool-run raises on purpose."""

    exit_code = 1


class UsageError(DeadpoolError):
    """The command line, an environment variable or a configuration file asks for something impossible."""

    exit_code = 2


class NoSuchRunError(DeadpoolError):
    """No live run was found where the user pointed."""

    exit_code = 4


class ScriptError(DeadpoolError):
    """The training script used the library in a way that cannot work."""


class RehearsalError(ScriptError):
    """A replacement's rehearsal left out what set-up and the first steps make."""


class RefusedError(ScriptError):
    """The job was stopped before any damage, because its weights after a repair could not be those of an unfailed run."""

    exit_code = 94
    reported = False
    """Whether the launcher has been told already, with the place in the script: nobody has to print it again."""


class ReplicasDifferError(RefusedError):
    """Replicas that were equal before a repair differ after it."""

    exit_code = 95


class StepAborted(DeadpoolError):  # noqa: N818 - an interruption, not an error: `with step:` swallows it
    """A peer was lost during this step; raised out of `optimizer.step()` and swallowed by `with step:`."""


class RunLeft(BaseException):
    """This run of the script is left, to run it again from the top. No `Exception`: no handler of the script's keeps it."""


class ProtocolError(DeadpoolError):
    """A peer sent something that is not of the protocol, or of another version of it."""

    exit_code = 90


class SnapshotError(DeadpoolError):
    """A snapshot is missing, incomplete, or does not match the objects it is to be restored into."""

    exit_code = 91


class AttachError(DeadpoolError):
    """A communicator could not be built with the members of this epoch."""

    exit_code = 92


class CheckpointError(DeadpoolError):
    """A durable checkpoint cannot be written, or is torn, damaged, or none that this job can go on from."""

    exit_code = 93


class VersionGoneError(CheckpointError):
    """The version that was to be written is not held by every rank any more."""
