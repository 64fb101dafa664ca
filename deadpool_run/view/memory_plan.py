"""The memory that snapshots and copies of a planned job need on each node, and whether it is there. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NodeRecord
from deadpool_run.text import counted, size
from deadpool_run.view.plan import begun

SLOTS = 2
"""Snapshots of a rank on its own node: the last one that is safe, and the next."""
SEGMENTS_PER_COPY = 3
"""Snapshots that a node holds of a rank of another node: two, and one that is being received."""
SEGMENTS_PER_PARITY = 2
"""Snapshots' worth of memory that a node holds for a group of ranks that share a parity: one parity, and the next."""
BYTES_PER_PARAMETER = 12
"""A float32 parameter and Adam's two moments."""


@dataclass(frozen=True, slots=True)
class Need:
    """The snapshots and copies of a node, if every copy is in its place."""

    node: str
    ranks: int
    """Ranks of its own."""
    copies: int
    """Ranks of other nodes whose copies it holds."""
    parities: int = 0
    """Groups of ranks of other nodes whose parities it holds."""

    @property
    def factor(self) -> int:
        """Return how many times the state of a rank this takes."""
        return SLOTS * self.ranks + SEGMENTS_PER_COPY * self.copies + SEGMENTS_PER_PARITY * self.parities


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that a machine may spend on snapshots and copies, in bytes, and what limits it, in words."""

    nbytes: int
    limited_by: str


def needs(settings: Settings, nodes: Sequence[NodeRecord]) -> list[Need]:
    """Return what each of these nodes holds once the job has begun, in their order."""
    state = begun(settings, nodes)
    copies = dict.fromkeys(state.nodes, 0)
    parities = dict.fromkeys(state.nodes, 0)
    for group in state.parity_groups:
        for holder in state.buddies[group[0]]:
            parities[holder] += 1
    grouped = frozenset(chain.from_iterable(state.parity_groups))
    for rank, holders in enumerate(state.buddies):
        for holder in holders if rank not in grouped else ():
            copies[holder] += 1
    return [Need(node.node, len(state.ranks_on(node.node)), copies[node.node], parities[node.node]) for node in nodes]


def lines(settings: Settings, nodes: Sequence[NodeRecord], room: Room, parameters: int | None) -> Iterator[str]:
    """Yield what each node needs for a GiB of each rank's state; or, with the number of parameters, for these."""
    found = needs(settings, nodes)
    most = max((need.factor for need in found), default=0)
    width = max((len(need.node) for need in found), default=0)
    yield "for each GiB of a rank's parameters and optimizer state:"
    for need in found:
        yield f"{need.node:<{width}}  {need.factor} GiB{_parts(need)}"
    yield f"this machine may spend {size(room.nbytes)}: {room.limited_by}"
    if parameters is not None:
        yield from _for_parameters(settings.world_size, parameters, most, room)
    elif most:
        yield f"up to {size(room.nbytes // most)} of state per rank fit; add --simulate-parameters COUNT to see what a model needs"


def _for_parameters(world_size: int, parameters: int, most: int, room: Room) -> Iterator[str]:
    whole = parameters * BYTES_PER_PARAMETER
    yield (
        f"{parameters:,} parameters have {size(whole)} of state: {BYTES_PER_PARAMETER} bytes each, "
        "as float32 with Adam's two moments"
    )
    for kind, state in (
        ("whole on each rank (DDP)", whole),
        ("sharded over all ranks (FSDP)", -(-whole // world_size)),
    ):
        needed = most * state
        fits = "fits" if needed <= room.nbytes else f"does not fit: {size(needed - room.nbytes)} are missing"
        yield f"{kind}: {size(state)} per rank, so up to {size(needed)} per machine: {fits}"


def _parts(need: Need) -> str:
    parts = (
        (SLOTS * need.ranks, f"snapshots of {counted(need.ranks, 'rank')}"),
        (SEGMENTS_PER_COPY * need.copies, f"copies of {counted(need.copies, 'rank')}"),
        (SEGMENTS_PER_PARITY * need.parities, f"{need.parities} {'parity' if need.parities == 1 else 'parities'}"),
    )
    words = [f"{factor} for {what}" for factor, what in parts if factor]
    return f": {', '.join(words)}" if words else ""
