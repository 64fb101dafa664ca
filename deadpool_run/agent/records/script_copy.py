"""The script as it was when the job began, in the run's directory. Workers run this copy.

Users edit scripts while a job runs. A replacement that ran the edited one would train otherwise than the other ranks.
"""

from pathlib import Path

from deadpool_run.agent.spec import LaunchSpec, Mode, Target
from deadpool_run.errors import UsageError

_NAME = "script.py"


def read(target: Target) -> bytes | None:
    """Return what the target's Python file contains; None if it is something else, or cannot be read: the worker says why."""
    script = Path(target.argv[0])
    if target.mode is not Mode.PATH or script.suffix == ".pyc":
        return None
    try:
        return script.read_bytes()
    except OSError:
        return None


def write(spec: LaunchSpec) -> None:
    """Write the copy. Raises `UsageError`."""
    if spec.script is not None:
        try:
            (spec.run_dir / _NAME).write_bytes(spec.script)
        except OSError as error:
            raise UsageError(
                f"run directory {spec.run_dir}: {error.strerror}\nchoose another with --run-dir"
            ) from error


def path(spec: LaunchSpec) -> str:
    """Return the copy's path; empty if there is none."""
    return "" if spec.script is None else str(spec.run_dir / _NAME)
