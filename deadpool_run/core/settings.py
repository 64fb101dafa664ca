"""Settings of the coordinator; fixed for the life of a job."""

from dataclasses import dataclass

MAX_GROUP = 64
"""The most ranks that may share a parity."""


def more_to_attach_s(world_size: int) -> float:
    """Return how much longer an attach may take in a large world, where each communicator connects with more ranks.

    NCCL and Gloo need up to 8 ms a rank, it is thought. This is seven times as much, and nothing for fewer than 16 ranks.
    """
    return float(world_size // 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one job. Durations are in seconds."""

    world_size: int
    spares: int = 0
    """Workers beyond the world's, on the nodes that hold its ranks."""
    nodes: int = 1
    """Nodes that hold ranks, equally many each."""
    hot_spares: bool = False
    """Spares rehearse the script ahead of need, each as one rank of its node."""
    spare_nodes: int = 0
    """Whole nodes in reserve."""
    replicas: int = 1
    """Copies of each snapshot on other nodes; with one node there are none."""
    ranks_per_parity: int = 1
    """With more than one, so many ranks of different nodes share a parity on another node, in place of copies."""
    durable: bool = False
    """The world can restart from a durable checkpoint when no node holds what it needs to resume."""
    join_timeout_s: float = 600.0
    """How long the coordinator waits for missing nodes."""
    node_timeout_s: float = 5.0
    """A node that is silent for this time is lost. One that hears no leader stops its workers before, and ends them after four times it."""
    max_restarts: int | None = None
    """Restarts of the whole world. None: 3 for a script that calls `init()`, 0 for any other (as torchrun)."""
    abort_timeout_s: float = 30.0
    """How long a survivor's interrupted step may take to end. Then the survivor leaves it, and runs its script again."""
    repair_timeout_s: float = 60.0
    """How long a member may make no progress within a repair. Then it is ended and replaced."""
    shutdown_timeout_s: float = 30.0
    """From SIGTERM to SIGKILL."""
    capture_interval: int = 1
    """Steps between snapshots; the coordinator doubles it while captures are skipped, up to `max_capture_interval`."""
    max_capture_interval: int = 16
    calm_s: float = 2.0
    """After this time without a skipped capture, the interval is halved again, down to `capture_interval`."""
    max_calm_s: float = 120.0
    """That time is doubled, up to this one, each time that captures are skipped soon after the interval was halved."""

    def __post_init__(self) -> None:
        """Check the settings. Raises ValueError."""
        if self.world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {self.world_size}")
        if self.nodes < 1 or self.world_size % self.nodes:
            raise ValueError(f"{self.world_size} ranks cannot be spread evenly over {self.nodes} nodes")
        for name in ("spares", "spare_nodes", "replicas"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, not {getattr(self, name)}")
        if not 1 <= self.ranks_per_parity <= MAX_GROUP:
            raise ValueError(f"ranks_per_parity must be from 1 to {MAX_GROUP}, not {self.ranks_per_parity}")
        if self.ranks_per_parity > 1 and self.replicas != 1:
            raise ValueError(f"with parities, replicas must be 1, not {self.replicas}")

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node that holds any."""
        return self.world_size // self.nodes
