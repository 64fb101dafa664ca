"""Who holds the copies of whose snapshots: always another node, another leaf where there is one, spread evenly. Pure."""

from collections import Counter

from deadpool_run.core.membership import Node, State
from deadpool_run.core.settings import Settings
from deadpool_run.ids import NodeId


def choose(settings: Settings, state: State) -> tuple[tuple[NodeId, ...], ...]:
    """Return each rank's holders; empty if there is nobody to hold anything.

    Whoever holds copies now keeps them where nobody is better, since every change costs the traffic of a whole snapshot.
    """
    replicas = min(settings.replicas, len(state.nodes) - 1)
    if replicas < 1:
        return ()
    load: Counter[NodeId] = Counter()
    most = -(-settings.world_size * replicas // len(state.nodes))
    chosen = []
    for seat in state.seats:
        home = None if seat.node is None else state.nodes.get(seat.node)
        before = state.buddies[seat.rank] if state.buddies else ()
        holders = _holders(state, home, before, replicas, load, most)
        load.update(holders)
        chosen.append(holders)
    return tuple(chosen)


def _holders(  # noqa: PLR0913, PLR0917 - what the choice depends on
    state: State, home: Node | None, before: tuple[NodeId, ...], replicas: int, load: Counter[NodeId], most: int
) -> tuple[NodeId, ...]:
    start = 0 if home is None else home.arrival + 1

    def preference(node: Node) -> tuple[bool, bool, bool, int, int]:
        around = (node.arrival - start) % (state.arrivals + 1)  # the next ones in a ring, where all else is equal
        return _is_near(node, home), load[node.node] >= most, node.node not in before, load[node.node], around

    others = sorted((node for node in state.nodes.values() if node is not home), key=preference)
    best = [node.node for node in others[:replicas]]
    return tuple(sorted(best, key=lambda node: before.index(node) if node in before else len(before)))


def _is_near(node: Node, home: Node | None) -> bool:
    return home is not None and bool(node.place.leaf) and node.place.leaf == home.place.leaf
