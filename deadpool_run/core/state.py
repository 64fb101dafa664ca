"""The coordinator's state, with invariants next to the fields. Only `coordinator.step` changes it."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from deadpool_run.core.counters import MemberCounters, SeatCounters
from deadpool_run.core.effects import Incident, Loss
from deadpool_run.core.events import Event, Place
from deadpool_run.core.found import Discards, WorkerFound
from deadpool_run.core.members import NO_EPOCH, NO_VERSION, Member, Seat
from deadpool_run.core.transitions import ATTACHED, JobPhase, MemberPhase
from deadpool_run.errors import Blame
from deadpool_run.ids import Epoch, NodeId, Rank, Version, WorkerId

_FIRST_WORKER = WorkerId(0)


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One living node."""

    node: NodeId
    place: Place
    arrival: int
    """The number of nodes that had joined before it, lost ones included."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A node that had no memory for copies of some ranks."""

    refused: frozenset[Rank]
    """The ranks whose copies it refused, and has not taken since."""
    wait_s: float
    """How long it gets no further copies."""
    until: float | None
    """When it is tried again; None since then, as long as it refuses nothing."""


@dataclass(slots=True)
class Repair:
    """A repair under way, from the first loss until every rank has completed a step. Times are those of `now`."""

    began_at: float
    losses: tuple[Loss, ...] = ()
    lost_at: dict[Rank, float] = field(default_factory=dict)
    """When each rank was last lost."""
    attempts: int = 0
    """Attempts that got a replacement or chose a version, and the first."""
    retries: int = 0
    """Epochs that began because the network failed: communicators broke, or a copy did not come. They are no attempts."""
    retry_at: float | None = None
    """When the next of these begins; None if none is due."""
    fetch_again_at: float | None = None
    """When replacements fetch their states again, as the only node that has one could not send it; None if none waits."""
    fetch_failed_at: float | None = None
    """When the first of these fetches failed; None since another node is the source."""
    replaced_for_network_at: float | None = None
    """When a worker was last ended because communicators could not be built."""
    unreached: dict[Rank, tuple[Rank, ...]] = field(default_factory=dict)
    """Of each rank that could not build its communicators in this epoch: the ranks that it did not reach."""
    asked_at: float | None = None
    """When nodes were last asked for copies of a rank; None if no answer is missing."""
    searched_in: Epoch = NO_EPOCH
    """The last epoch in which no version was common, so that every rank's old ones were asked for."""
    resume: Version | None = None
    """The version of this epoch; None until it is chosen. Held by every rank."""
    completed: Version | None = None
    """The most steps that any survivor had completed."""
    dead_held: Version | None = None
    """The newest version that a dead rank left behind."""
    reentered: frozenset[Rank] = frozenset()
    """Ranks whose workers were ordered to run their script again."""
    failed_sources: frozenset[tuple[Rank, NodeId]] = frozenset()
    """Nodes that could not send the copies of a rank that they reported: they are not asked again."""
    detected_s: float | None = None
    aborted_at: float | None = None
    promoted_at: float | None = None
    rehearsed_at: float | None = None
    restored_at: float | None = None
    attached_at: float | None = None
    exposed_s: float | None = None
    """See `effects.Incident`; None until it is known."""


@dataclass(slots=True)
class Relocation:
    """A drain under way: ranks move to spares at a step's end. See `recovery.relocation`."""

    began_at: float
    node: NodeId | None
    """Every rank on this node moves."""
    worker: WorkerId | None
    """Or only the rank of this worker."""
    meets_in: Epoch = NO_EPOCH
    """The epoch in which ranks were asked to meet. Void in any other."""
    limit: Version = NO_VERSION
    """The newest version at which some rank can stop."""
    is_set: bool = False
    """Every rank was told the limit."""
    waiting: set[WorkerId] = field(default_factory=set)
    """Workers that have not said where they can stop; once the limit is set, those that have not reached it."""
    moves_in: Epoch = NO_EPOCH
    """The epoch in which the workers are ended, and their ranks move. Void in any other."""


@dataclass(slots=True)
class Move:
    """A takeover under way. Nothing is decided until every node has sent its inventory."""

    began_at: float
    to: NodeId
    waiting: set[NodeId]
    """Nodes that have not sent their inventory."""
    found: dict[NodeId, tuple[WorkerFound, ...]] = field(default_factory=dict)
    lost: Mapping[NodeId, str] = field(default_factory=dict)
    """Nodes that were lost meanwhile, with the reasons."""
    discarded: tuple[Epoch, Version] = (NO_EPOCH, NO_VERSION)
    """The newest `DiscardAbove` that reached any node."""
    earlier: Discards = ()
    """Those that reached the same node before it."""
    discarded_in: list[Epoch] = field(default_factory=list)
    """The epoch of the last one that reached each node."""
    holds: dict[NodeId, tuple[Rank, ...]] = field(default_factory=dict)
    """The ranks of which each node has anything."""
    deferred: list[Event] = field(default_factory=list)
    """Events that wait for the end of the takeover."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """A failed collective of this epoch, while no worker is known to be dead."""

    worker: WorkerId
    at: float
    message: str


@dataclass(frozen=True, slots=True)
class Raise:
    """An exception that ended a script, as evidence of a bug."""

    worker: WorkerId
    rank: Rank
    epoch: Epoch
    phase: MemberPhase
    """Of its worker, when it was raised."""
    in_abort: bool
    """It interrupted only the abort of a step."""
    step: int | None
    kind: str
    message: str
    traceback: str
    place: tuple[NodeId, int]
    """The node and the local rank."""
    elsewhere: bool
    """A worker on another node, or on another GPU, could take the rank. Then two exceptions at one place prove nothing: the place may be bad."""
    blame: Blame = Blame.SCRIPT


@dataclass(frozen=True, slots=True)
class JobEnd:
    """Why and how the job ends."""

    exit_code: int
    reason: str


@dataclass
class State:
    """All state of the coordinator."""

    phase: JobPhase
    capture_interval: int
    """Steps between snapshots. Members learn it by `SetCaptureInterval`, new ones with their assignment."""
    seats: tuple[Seat, ...]
    """One per rank, in order."""
    epoch: Epoch = NO_EPOCH
    """Never decreases. 0 before the first world."""
    term: int = 0
    """Increases each time the coordinator moves, by 1 or more. Epochs and numbers of workers begin at `term << 20`."""
    founded: int = 0
    """The term in which the job began. Part of the ids of its nodes."""
    move: Move | None = None
    generation: int = 0
    """Worlds begun from the top, counted from 0."""
    restarts: int = 0
    managed: bool = False
    """Some worker called `init()`."""
    warn_at: float | None = None
    """When to warn the user that this world is not protected yet; None if no warning is due."""
    protection_overdue: bool = False
    """This world should be protected by now, or may never be. Without meaning once it is protected."""
    entered: bool = False
    """Some worker of this world has entered its step loop."""
    bypassed: bool = False
    """Some worker of this world updates weights outside its step loop."""
    nodes: dict[NodeId, NodeRecord] = field(default_factory=dict)
    """The living ones, in order of arrival."""
    failure_domains: dict[NodeId | None, str] = field(default_factory=dict)
    """The failure domain of every node that ever joined."""
    arrivals: int = 0
    """Nodes that ever joined."""
    joined_at: float = 0.0
    """When a node last joined or was lost."""
    spares_waited_for: bool = False
    """The world may begin without the spare nodes."""
    buddies: tuple[tuple[NodeId, ...], ...] = ()
    """Per rank, the nodes that get its copies; empty while nothing is copied."""
    parity_groups: tuple[tuple[Rank, ...], ...] = ()
    """The groups of ranks that share a parity, which their buddy keeps in place of copies."""
    former_buddies: tuple[tuple[NodeId, ...], ...] = ()
    """The buddies before these, which may hold what the present ones have not received yet."""
    buddies_ordered: bool = True
    """`SetBuddies` was ordered for the present ones in this term."""
    shortages: dict[NodeId, Shortage] = field(default_factory=dict)
    """Per node that has refused copies. Only living nodes."""
    refused_at: float | None = None
    """When the first copy was refused for which no other node has been chosen yet; None if there is none."""
    committed: bool = False
    """Every rank has copies of some version of this generation on other nodes."""
    exposed_at: float | None = None
    """When a node with ranks or copies was lost; None if every rank has all its copies."""
    members: dict[WorkerId, Member] = field(default_factory=dict)
    next_worker: WorkerId = _FIRST_WORKER
    """Above every id ever used."""
    repair: Repair | None = None
    """Set in REPAIRING, and in RUNNING until every rank has completed a step."""
    relocation: Relocation | None = None
    """Set in RUNNING, and in REPAIRING while its ranks move."""
    closed: frozenset[NodeId] = frozenset()
    """Living nodes that are drained, or were: they get no ranks and no workers. Once they have no ranks, no copies either."""
    released: frozenset[NodeId] = frozenset()
    """Those of them that were allowed to leave, in this term."""
    suspicion: Suspicion | None = None
    unpreparable: bool = False
    """A spare could not rehearse ahead of need, so no other tries."""
    raises: tuple[Raise, ...] = ()
    skipped_at: float | None = None
    """When a capture was last skipped, or the interval last changed; None if captures are at their shortest interval."""
    calm_s: float = 0.0
    """For how long no capture must be skipped before the interval is halved; 0: the setting's."""
    halved: bool = False
    """The interval's last change made it shorter."""
    raised_to: Version = NO_VERSION
    """Skips of versions up to this one do not count: the interval has been lengthened since they were due."""
    failures: dict[NodeId, dict[int, int]] = field(default_factory=dict)
    """Per node and local rank: failures of ranks there since every rank last completed a step. See `places`."""
    crashes: dict[NodeId, tuple[float, ...]] = field(default_factory=dict)
    """Per node, when the last parked workers died. Forgotten once one took a lost rank and completed a step."""
    never_ready: dict[NodeId, int] = field(default_factory=dict)
    """Per node, how many workers in a row were ended because they were never ready."""
    incidents: tuple[Incident, ...] = ()
    """The last ones, oldest first."""
    done_at: float | None = None
    """When the last rank exited 0."""
    stop: JobEnd | None = None
    """Set in STOPPING and STOPPED."""
    reason: str = ""
    """Of the last decision."""

    def __post_init__(self) -> None:
        """Add what is neither encoded nor compared."""
        self.is_void = False
        """A step began and did not end, so the state is half-changed."""
        self.member_counters = MemberCounters(self.members)
        self.seat_counters = SeatCounters(self.seats)
        self.incomplete: tuple[NodeId, object] | None = None
        """The node for whose workers the world waits, and on what this choice depends."""

    def owner(self, rank: Rank) -> Member | None:
        """Return the member that holds the rank, also while it is dying."""
        owner = self.seats[rank].owner
        return None if owner is None else self.members[owner]

    def owners(self) -> Iterator[Member]:
        """Yield the members that hold a rank, by rank."""
        for seat in self.seats:
            if seat.owner is not None:
                yield self.members[seat.owner]

    def vacant(self) -> list[Seat]:
        """Return the seats that need a worker."""
        return [self.seats[rank] for rank in sorted(self.seat_counters.vacant)]

    def ranks_on(self, node: NodeId) -> AbstractSet[Rank]:
        """Return the ranks whose owners live on the node, or lived there last."""
        return self.seat_counters.by_node.get(node, frozenset())

    def is_left(self, node: NodeId) -> bool:
        """Tell whether the node is drained and has no ranks any more."""
        return node in self.closed and not self.ranks_on(node)

    def on_node(self, node: NodeId) -> list[Member]:
        """Return the node's members, oldest first."""
        return [self.members[worker] for worker in sorted(self.member_counters.by_node.get(node, ()))]

    def in_phase(self, *phases: MemberPhase) -> list[Member]:
        """Return the members in these phases, oldest first."""
        by_phase = self.member_counters.by_phase
        found = [worker for phase in phases if phase in by_phase for worker in by_phase[phase]]
        return [self.members[worker] for worker in sorted(found)]

    def count(self, *phases: MemberPhase) -> int:
        """Return how many members are in these phases."""
        by_phase = self.member_counters.by_phase
        return sum([len(by_phase.get(phase, ())) for phase in phases])


def all_attached(state: State) -> bool:
    """Tell whether every rank is held by a member that is attached to this epoch."""
    counters = state.seat_counters
    if counters.vacant or state.count(*ATTACHED) + counters.done < len(state.seats):
        return False
    return all(member.phase in ATTACHED for member in state.owners())
