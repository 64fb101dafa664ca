"""The health of a run, computed from its status. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

Status = Mapping[str, Any]
"""A status object, as `status_report` makes it."""


class JobHealth(StrEnum):
    """The state of a run in one word."""

    HEALTHY = "healthy"
    STARTING = "starting"
    """Not protected yet, like every job at its start."""
    UNPROTECTED = "unprotected"
    """Not protected for a long time, perhaps never: a lost rank restarts or ends the job."""
    DEGRADED = "degraded"
    """Training with fewer ready spares, or fewer copies on other nodes, than requested, or without memory for snapshots."""
    RECOVERING = "recovering"
    ENDING = "ending"


EXIT_CODES: Mapping[JobHealth, int] = {
    how: 0 if how in (JobHealth.HEALTHY, JobHealth.STARTING) else 3 for how in JobHealth
}


def health(status: Status) -> JobHealth:  # noqa: PLR0911 - one case for each
    """Return the health of the run."""
    match status.get("phase"):
        case "setting up" if status.get("unprotected_reason"):
            return JobHealth.UNPROTECTED
        case "new" | "starting" | "setting up":
            return JobHealth.STARTING
        case "repairing" | "restarting":
            return JobHealth.RECOVERING
        case "stopping" | "stopped":
            return JobHealth.ENDING
        case "running" if len(ready_spares(status)) < spares_asked(status):
            return JobHealth.DEGRADED
        case "running" if status.get("exposed_ms") is not None or without_memory(status) or without_copies(status):
            return JobHealth.DEGRADED
        case _:
            return JobHealth.HEALTHY


def ranks_per_node(status: Status) -> int:
    """Return the number of ranks on each node that has ranks."""
    run = status.get("run", {})
    return int(run.get("world_size", 0)) // max(1, int(run.get("nodes", 1)))


def spares_asked(status: Status) -> int:
    """Return the number of requested spare workers, including those of spare nodes."""
    run = status.get("run", {})
    return int(run.get("spares", 0)) + ranks_per_node(status) * int(run.get("spare_nodes", 0))


def without_memory(status: Status) -> list[int]:
    """Return the ranks that take no snapshots, because there is no memory for them."""
    return [int(rank["rank"]) for rank in status.get("ranks", ()) if rank.get("no_memory_bytes")]


def without_copies(status: Status) -> int:
    """Return how many copies of ranks are not taken, because their nodes have no memory for them."""
    return sum((node.get("copies") or {}).get("without_memory", 0) for node in status.get("nodes", ()))


def ready_spares(status: Status) -> list[Status]:
    """Return the spares that can take a rank at once."""
    return [spare for spare in status.get("spares", ()) if spare.get("phase") == "ready"]
