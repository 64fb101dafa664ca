"""A summary of the coordinator's state for viewers, ready for JSON."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from deadpool_run.core.effects import Incident
from deadpool_run.core.recovery import restart
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.ids import NodeId

INCIDENTS_SHOWN = 5


@dataclass(frozen=True, slots=True)
class RankStatus:
    """One rank and its worker. Without a worker, `phase` is "vacant" or "done"."""

    rank: int
    worker: int | None
    pid: int | None
    phase: str
    node: str | None


@dataclass(frozen=True, slots=True)
class SpareStatus:
    """One worker without a rank. `prepared`: the rank that it has rehearsed."""

    worker: int
    pid: int | None
    phase: str
    node: str
    prepared: int | None = None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One live node, and the ranks whose copies it holds."""

    node: str
    name: str
    address: str
    failure_domain: str
    copies_of: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Status:
    """The job at one moment."""

    phase: str
    epoch: int
    generation: int
    restarts: int
    managed: bool
    """A worker called `init()`, so losses can be repaired in place."""
    ranks: tuple[RankStatus, ...]
    spares: tuple[SpareStatus, ...]
    nodes: tuple[NodeStatus, ...]
    capture_interval: int
    resume: int | None
    """The version that the current repair resumes from, once chosen."""
    unprotected: str
    """Why the job is not protected although it should be, and the fix; else empty."""
    incidents: tuple[Incident, ...]
    """The last repairs, oldest first."""
    reason: str
    """Reason of the last decision."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dict(msgspec.to_builtins(self))


def summary(state: State) -> Status:
    """Return the summary of a state."""
    return Status(
        phase=state.phase.value,
        epoch=state.epoch,
        generation=state.generation,
        restarts=state.restarts,
        managed=state.managed,
        ranks=tuple(_rank(state, rank) for rank in range(len(state.seats))),
        spares=tuple(
            SpareStatus(worker, member.pid, member.phase.value, member.node, member.prepared)
            for worker, member in sorted(state.members.items())
            if member.rank is None
        ),
        nodes=tuple(_nodes(state)),
        capture_interval=state.capture_interval,
        resume=None if state.repair is None or state.phase is not JobPhase.REPAIRING else state.repair.resume,
        unprotected=_unprotected(state),
        incidents=state.incidents[-INCIDENTS_SHOWN:],
        reason=state.reason,
    )


def _unprotected(state: State) -> str:
    if state.phase is not JobPhase.UNPROTECTED or not state.unprotected:
        return ""
    return ": ".join(restart.describe_unprotected(state))


def _rank(state: State, rank: int) -> RankStatus:
    seat = state.seats[rank]
    if seat.owner is None:
        return RankStatus(rank, None, None, "done" if seat.done else "vacant", seat.node)
    member = state.members[seat.owner]
    unmanaged = member.phase is MemberPhase.SETTING_UP and not state.managed
    return RankStatus(rank, member.worker, member.pid, "running" if unmanaged else member.phase.value, member.node)


def _nodes(state: State) -> Iterator[NodeStatus]:
    copies_of: dict[NodeId, list[int]] = {node: [] for node in state.nodes}
    for rank, buddies in enumerate(state.buddies):
        for buddy in buddies:
            if buddy in copies_of:
                copies_of[buddy].append(rank)
    for node in state.nodes.values():
        place = node.place
        yield NodeStatus(node.node, place.name, place.address, place.failure_domain, tuple(copies_of[node.node]))
