"""deadpool-run: a torchrun that replaces a lost rank with a spare, in place.

The public names of a training script. They are loaded when they are first used, so that importing the package (for
`--help`, `status`, `kill-rank` and the agent) never imports torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deadpool_run.errors import StepAborted
    from deadpool_run.worker.job import Job, Step, init

__all__ = ["Job", "Step", "StepAborted", "init"]

_HOMES = {
    "Job": "deadpool_run.worker.job",
    "Step": "deadpool_run.worker.job",
    "StepAborted": "deadpool_run.errors",
    "init": "deadpool_run.worker.job",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its home (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'deadpool_run' has no attribute {name!r}")
    import importlib  # noqa: PLC0415 - loaded lazily on purpose

    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the public names."""
    return sorted(__all__)
