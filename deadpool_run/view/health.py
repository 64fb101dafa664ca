"""What a status says of a run's health. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

Status = Mapping[str, Any]
"""The status object of `coordinator.control`."""


class JobHealth(StrEnum):
    """What a script that asks wants to know."""

    HEALTHY = "healthy"
    STARTING = "starting"
    """It has begun, and is not protected yet, as every job at first."""
    UNPROTECTED = "unprotected"
    """It has not been protected for long, or may never be: a lost rank restarts or ends it."""
    DEGRADED = "degraded"
    """It trains, with fewer spares ready, or fewer copies on other nodes, than were asked for."""
    RECOVERING = "recovering"
    ENDING = "ending"


EXIT_CODES: Mapping[JobHealth, int] = {
    how: 0 if how in (JobHealth.HEALTHY, JobHealth.STARTING) else 3 for how in JobHealth
}


def health(status: Status) -> JobHealth:  # noqa: PLR0911 - one case for each
    """Return how the run is."""
    match status.get("phase"):
        case "unprotected" if status.get("unprotected"):
            return JobHealth.UNPROTECTED
        case "new" | "starting" | "unprotected":
            return JobHealth.STARTING
        case "repairing" | "restarting":
            return JobHealth.RECOVERING
        case "stopping" | "stopped":
            return JobHealth.ENDING
        case "running" if len(ready_spares(status)) < spares_asked(status):
            return JobHealth.DEGRADED
        case "running" if status.get("exposed_ms") is not None:
            return JobHealth.DEGRADED
        case _:
            return JobHealth.HEALTHY


def ranks_per_node(status: Status) -> int:
    """Return how many ranks each node holds that holds any."""
    run = status.get("run", {})
    return int(run.get("world_size", 0)) // max(1, int(run.get("nodes", 1)))


def spares_asked(status: Status) -> int:
    """Return how many spare workers there are to be, those of whole nodes in reserve included."""
    run = status.get("run", {})
    return int(run.get("spares", 0)) + ranks_per_node(status) * int(run.get("spare_nodes", 0))


def ready_spares(status: Status) -> list[Status]:
    """Return the spares that could take a rank's place at once."""
    return [spare for spare in status.get("spares", ()) if spare.get("phase") == "ready"]
