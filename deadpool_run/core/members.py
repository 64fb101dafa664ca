"""The coordinator's records of workers and ranks. Only the setters of `decision.Decision` change them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from deadpool_run.core.injection import Slowness
from deadpool_run.core.transitions import MemberPhase
from deadpool_run.ids import Epoch, NodeId, Rank, Version, WorkerId

NO_EPOCH = Epoch(0)
NO_VERSION = Version(-1)

Copies = Mapping[NodeId, frozenset[Version]]


@dataclass(slots=True)
class Member:
    """One worker: one process life, from the order to start it until it is reaped."""

    worker: WorkerId
    node: NodeId
    phase: MemberPhase
    since: float
    """When it entered its phase or last showed progress in it."""
    pid: int | None = None
    """None until the process exists."""
    rank: Rank | None = None
    """Set exactly while the rank's seat names this worker as its owner."""
    prepared: Rank | None = None
    """The rank that a spare has rehearsed, or rehearses, ahead of need. Kept when it is given any rank."""
    place: int | None = None
    """Where it has rehearsed, on a node with GPUs: it uses that GPU for good."""
    replacement: bool = False
    """It was assigned in a repair and has not held its rank's state yet."""
    reentered: bool = False
    """It was ordered to run its script again since it last attached, and is not ordered a second time."""
    ready_at: float | None = None
    stepped: bool = False
    """It has completed a step (or its loop) since it attached to this epoch."""
    finished: Version | None = None
    injected_at: float | None = None
    """When a user's fault was ordered for it."""
    slowed: Slowness | None = None
    """How a user's fault slows it, or slowed it last."""
    slowed_until: float = 0.0
    ending_why: str = ""
    """Why it was ordered to die; empty unless ENDING."""
    ending_grace_s: float = 0.0
    kills: int = 0
    """How often it was sent SIGKILL."""
    claimed: Rank | None = None
    """A rank that another coordinator gave it, and that waits for its end. Implies ENDING and no rank."""
    no_memory: bool = False
    """It has reported that there is no memory for its snapshots."""
    blameless: bool = False
    """It is ended because others failed it, which is no evidence against the script."""
    planned: bool = False
    """It is ended because its rank is drained. Implies ENDING."""

    @property
    def held_rank(self) -> Rank:
        """Its rank; it must have one."""
        assert self.rank is not None
        return self.rank

    @property
    def is_injected(self) -> bool:
        """Whether a user's fault explains its end: it was ordered to die, or it was slowed and we ended it for no progress."""
        was_ended_slow = (
            self.slowed is not None and self.phase is MemberPhase.ENDING and self.since <= self.slowed_until
        )
        return self.injected_at is not None or was_ended_slow

    def slowness(self, now: float) -> float:
        """Return how many times as long as usual everything takes it: 1 unless a user's fault slows it."""
        return self.slowed.factor if self.slowed is not None and now < self.slowed_until else 1.0

    @property
    def patience_from(self) -> float:
        """When the time limit of its phase begins: after the grace, if it is being ended."""
        return self.since + self.ending_grace_s


@dataclass(slots=True)
class Seat:
    """A rank, with or without a worker."""

    rank: Rank
    owner: WorkerId | None = None
    rehearsable: bool = False
    """A replacement can rehearse the rank. Stays true for the generation."""
    like: Rank | None = None
    """The lowest of the ranks that hold the same parameters, as its worker reports; None if no other does."""
    done: bool = False
    """Its worker exited 0; such a rank is never replaced. Implies no owner."""
    held: frozenset[Version] | None = None
    """In a repair: the versions that this rank can be brought to; None while that is not known."""
    node: NodeId | None = None
    """Where its owner lives, or its last one lived; None before the first."""
    local_rank: int = 0
    """Its place among the ranks of that node; on a node with a GPU for each rank, the number of its GPU."""
    copies: Copies = field(default_factory=dict)
    """In a repair, of a rank that lost its owner: the nodes that hold its transcript, and their versions. Replaced, not changed."""
    asked: frozenset[NodeId] = frozenset()
    """Nodes that have not answered yet what they hold of the rank."""
    asked_in: Epoch = NO_EPOCH
    """The epoch of the question. Answers to an older one are ignored."""

    @property
    def is_vacant(self) -> bool:
        """Whether the rank needs a worker."""
        return self.owner is None and not self.done


def vacant_seats(world_size: int) -> tuple[Seat, ...]:
    """Return the seats of a world that begins."""
    return tuple(Seat(Rank(rank)) for rank in range(world_size))
