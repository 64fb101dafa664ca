"""Who holds the copies of whose snapshots: always another node, another failure domain where there is one, spread evenly. Pure.

Best is a node with a rank that holds the same parameters: what it has already is not sent.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NodeRecord, State
from deadpool_run.ids import NodeId, Rank

_FEW = 64
"""So many nodes are sorted for each rank. More are found soon enough among all."""


def choose(settings: Settings, state: State) -> tuple[tuple[NodeId, ...], ...]:
    """Return each rank's holders; empty if there is nobody to hold anything.

    Whoever holds copies now keeps them where nobody is better, since every change costs the traffic of a whole snapshot.
    """
    replicas = min(settings.replicas, len(state.nodes) - 1)
    if replicas < 1:
        return ()
    alike = _alike(state)
    ring = _Ring(state, most=-(-settings.world_size * replicas // len(state.nodes)))
    chosen = []
    for seat in state.seats:
        home = None if seat.node is None else state.nodes.get(seat.node)
        before = state.buddies[seat.rank] if state.buddies else ()
        same = frozenset[NodeId]() if seat.like is None else alike.get(seat.like, frozenset())
        best = list(islice(ring.preferred(home, before, same), replicas))
        ring.load(best)
        holders = (node.node for node in best)
        chosen.append(tuple(sorted(holders, key=lambda node: before.index(node) if node in before else len(before))))
    return tuple(chosen)


class _Ring:
    """The nodes in order of arrival, those with equally many copies together: a choice need not look at all of them."""

    def __init__(self, state: State, most: int) -> None:
        """Begin with no copies anywhere. A node that holds `most` has its share."""
        self._state = state
        self._most = most
        self._copies: dict[NodeId, int] = dict.fromkeys(state.nodes, 0)
        self._with: dict[int, list[NodeRecord]] = {0: sorted(state.nodes.values(), key=_arrival)}

    def load(self, nodes: Iterable[NodeRecord]) -> None:
        """Give each of these one copy more."""
        for node in nodes:
            copies = self._copies[node.node]
            self._copies[node.node] = copies + 1
            left = self._with[copies]
            del left[bisect_left(left, node.arrival, key=_arrival)]
            if not left:
                del self._with[copies]
            insort(self._with.setdefault(copies + 1, []), node, key=_arrival)

    def preferred(
        self, home: NodeRecord | None, before: tuple[NodeId, ...], alike: frozenset[NodeId]
    ) -> Iterator[NodeRecord]:
        """Yield first those far from home that hold the same as the rank, then all others, as `best` has them."""
        first: list[NodeRecord] = []
        for node in self._few(home, before, alike) if len(alike) <= _FEW else self.best(home, before):
            if node.node in alike and node is not home and not _is_near(node, home):
                first.append(node)
                yield node
        for node in self.best(home, before):
            if node not in first:
                yield node

    def _few(self, home: NodeRecord | None, before: tuple[NodeId, ...], nodes: Iterable[NodeId]) -> list[NodeRecord]:
        """Return these nodes, the best first, without a look at all the others."""
        start = 0 if home is None else home.arrival + 1

        def worth(node: NodeRecord) -> tuple[bool, bool, int, int]:
            copies = self._copies[node.node]
            return copies >= self._most, node.node not in before, copies, self._distance(node, start)

        return sorted((self._state.nodes[node] for node in nodes if node in self._state.nodes), key=worth)

    def best(self, home: NodeRecord | None, before: tuple[NodeId, ...]) -> Iterator[NodeRecord]:
        """Yield all nodes but the rank's home, the best first.

        Those far from home come first, then those that have not their share yet, then those that hold the rank's copies
        now, then those with the fewest copies, and where all else is equal the next ones in the ring after home.
        """
        start = 0 if home is None else home.arrival + 1
        kept = [self._state.nodes[node] for node in before if node in self._state.nodes]
        kept = [node for node in dict.fromkeys(kept) if node is not home]
        kept.sort(key=lambda node: (self._copies[node.node], self._distance(node, start)))
        for near in (False, True):
            if near and not (home is not None and home.place.failure_domain):
                return
            for full in (False, True):
                here = [node for node in kept if self._is(node, home, near=near, full=full)]
                yield from here
                for node in self._around(start, full=full):
                    if node is not home and _is_near(node, home) is near and node not in here:
                        yield node

    def _distance(self, node: NodeRecord, start: int) -> int:
        """Return how far along the ring a node is from there."""
        return (node.arrival - start) % (self._state.arrivals + 1)

    def _is(self, node: NodeRecord, home: NodeRecord | None, *, near: bool, full: bool) -> bool:
        return _is_near(node, home) is near and (self._copies[node.node] >= self._most) is full

    def _around(self, start: int, *, full: bool) -> Iterator[NodeRecord]:
        """Yield those that have their share, or those that have not, by their number of copies and from `start` on."""
        for copies in sorted(self._with):
            if (copies >= self._most) is full:
                nodes = self._with[copies]
                first = bisect_left(nodes, start, key=_arrival)
                yield from chain(islice(nodes, first, None), islice(nodes, first))


def _alike(state: State) -> dict[Rank, frozenset[NodeId]]:
    """Return the nodes whose ranks hold the same parameters, by the lowest of these ranks."""
    found: dict[Rank, set[NodeId]] = {}
    for seat in state.seats:
        if seat.like is not None and seat.node is not None:
            found.setdefault(seat.like, set()).add(seat.node)
    return {rank: frozenset(nodes) for rank, nodes in found.items()}


def _arrival(node: NodeRecord) -> int:
    return node.arrival


def _is_near(node: NodeRecord, home: NodeRecord | None) -> bool:
    return (
        home is not None and bool(node.place.failure_domain) and node.place.failure_domain == home.place.failure_domain
    )
