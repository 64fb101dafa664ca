"""What a status says of a run's health. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

Status = Mapping[str, Any]
"""The status object of `coordinator.control`."""


class Health(StrEnum):
    """What a script that asks wants to know."""

    HEALTHY = "healthy"
    DEGRADED = "degraded"
    """It trains, with fewer spares ready than were asked for."""
    RECOVERING = "recovering"
    ENDING = "ending"


EXIT_CODES: Mapping[Health, int] = {Health.HEALTHY: 0, Health.DEGRADED: 3, Health.RECOVERING: 3, Health.ENDING: 3}


def health(status: Status) -> Health:
    """Return how the run is."""
    match status.get("phase"):
        case "repairing" | "restarting":
            return Health.RECOVERING
        case "stopping" | "stopped":
            return Health.ENDING
        case "running" if len(ready_spares(status)) < status.get("run", {}).get("spares", 0):
            return Health.DEGRADED
        case _:
            return Health.HEALTHY


def ready_spares(status: Status) -> list[Status]:
    """Return the spares that could take a rank's place at once."""
    return [spare for spare in status.get("spares", ()) if spare.get("phase") == "ready"]
