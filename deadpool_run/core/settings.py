"""What the coordinator's decisions depend on; fixed for the life of a job."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one job. Durations are in seconds."""

    world_size: int
    spares: int = 0
    max_restarts: int | None = None
    """Restarts of the whole world. None: 3 while a script that called `init()` sets up, 0 for any other (as torchrun)."""
    repair_timeout_s: float = 60.0
    """A member that makes no progress of its own within a repair for so long is ended and replaced."""
    shutdown_timeout_s: float = 30.0
    """From SIGTERM to SIGKILL."""
    capture_interval: int = 1
    """Steps between snapshots; the coordinator doubles it while captures are skipped, up to `max_capture_interval`."""
    max_capture_interval: int = 16
    calm_s: float = 30.0
    """Without a skipped capture for so long, the capture interval is halved again, down to `capture_interval`."""

    def __post_init__(self) -> None:
        """Refuse what no decision could be made with."""
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {self.world_size}")
        if self.spares < 0:
            raise ValueError(f"spares must not be negative, not {self.spares}")
