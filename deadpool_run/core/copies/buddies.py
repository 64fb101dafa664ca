"""Choice of the nodes that hold copies of each rank's snapshots: its buddies.

Copies are on other nodes, if possible in another failure domain, and are spread evenly. A node with a rank that holds the
same parameters is best, since it is not sent what it has. A node without memory for further copies comes last.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from msgspec.structs import replace

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.copies import parity_groups, shortages
from deadpool_run.core.copies.parity_groups import Group
from deadpool_run.core.decision import Decision
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import NodeRecord, State
from deadpool_run.ids import NodeId, Rank

_FEW = 64
"""Up to this many nodes with the same parameters are sorted for each rank. More are found fast enough among all nodes."""


def committed(decision: Decision, event: ev.SnapshotCommitted) -> None:
    """Note that every rank has all its copies, which ends the exposure after the loss of a node."""
    state = decision.state
    if event.epoch != state.epoch:
        return
    state.committed = True
    _note_cover(decision)
    if state.phase in shortages.COPIED_IN:
        state.former_buddies = ()  # the present ones have all that these hold


def is_exposed(settings: Settings, state: State) -> bool:
    """Tell whether ranks may lack copies after the loss of a node, although there are enough nodes."""
    if state.exposed_at is None or state.phase not in shortages.COPIED_IN:
        return False
    return bool(state.buddies) and all(len(holders) >= settings.replicas for holders in state.buddies)


def had_copies(state: State, nodes: Collection[NodeId]) -> bool:
    """Tell whether one of these nodes has a rank, or a copy of some rank's snapshots."""
    if not state.buddies:
        return False
    return any(map(state.ranks_on, nodes)) or not frozenset(nodes).isdisjoint(chain.from_iterable(state.buddies))


def _note_cover(decision: Decision) -> None:
    """End the exposure, and note its length in the incident that began it."""
    state = decision.state
    if not is_exposed(decision.settings, state) or state.exposed_at is None:
        return
    exposed_s = decision.now - state.exposed_at
    state.exposed_at = None
    decision.effects.append(do.Announce(f"every rank has all its copies again, {exposed_s:.2f} s after the loss", ""))
    last = state.incidents[-1] if state.incidents else None
    if state.repair is not None:
        state.repair.exposed_s = exposed_s
    elif last is not None and last.epoch == state.epoch and last.exposed_s is None:
        state.incidents = (*state.incidents[:-1], replace(last, exposed_s=exposed_s))


def update(decision: Decision) -> None:
    """Order copies to the nodes that should hold them now. During a repair the buddies stay as they were."""
    state = decision.state
    if state.phase not in shortages.COPIED_IN or _is_up_to_date(decision):
        return
    chosen, groups = arrange(decision.settings, state)
    state.refused_at = None
    if (chosen, groups) != (state.buddies, state.parity_groups):
        before = state.buddies
        state.former_buddies = _joined(state.former_buddies, before)  # they hold the only copies for now
        state.buddies, state.parity_groups, state.buddies_ordered = chosen, groups, False
        if before and chosen:
            shortages.announce(decision, before)
    if not state.buddies_ordered:
        state.buddies_ordered = True
        decision.effects.append(do.SetBuddies(chosen, groups))


def left_home(decision: Decision, rank: Rank, node: NodeId) -> None:
    """Count the node that the rank leaves as its former buddy: it has the newest version, and the present ones may not."""
    state = decision.state
    if state.buddies:
        homes = [(node,) if seat.rank == rank else () for seat in state.seats]
        state.former_buddies = _joined(state.former_buddies, homes)


def inherit(decision: Decision, holds: Mapping[NodeId, Iterable[Rank]]) -> None:
    """Count every node that holds anything of a rank as its former buddy, after a takeover.

    The last coordinator may have had copies sent there without this one's knowing.
    """
    state = decision.state
    found: list[tuple[NodeId, ...]] = [()] * len(state.seats)
    for node, ranks in holds.items():
        for rank in ranks:
            if not 0 <= rank < len(found):
                continue  # of another world
            owner = state.owner(rank)
            if owner is None or owner.replacement or owner.node != node:
                found[rank] += (node,)
    state.former_buddies = _joined(state.former_buddies, found)


def _joined(*each: Sequence[Sequence[NodeId]]) -> tuple[tuple[NodeId, ...], ...]:
    """Return for each rank the nodes that any of these has; nothing if none has any."""
    alone, *others = [holders for holders in each if holders] or [()]
    if others:
        joined = tuple(tuple(dict.fromkeys(chain(*holders))) for holders in zip(alone, *others, strict=True))
    else:
        joined = tuple(tuple(dict.fromkeys(holders)) if len(holders) > 1 else tuple(holders) for holders in alone)
    return joined if any(joined) else ()


def _is_up_to_date(decision: Decision) -> bool:
    """Tell whether this decision has changed nothing that the choice of buddies depends on."""
    changes, state = decision.changes, decision.state
    # Then every rank has reported which others hold the same parameters.
    rehearsable_now = not decision.all_rehearsable_before and not state.seat_counters.unrehearsable
    return (
        decision.phase_before in shortages.COPIED_IN
        and state.buddies_ordered
        and not (changes.joined or changes.nodes_lost or changes.placement or changes.shortages or rehearsable_now)
    )


def arrange(settings: Settings, state: State) -> tuple[tuple[tuple[NodeId, ...], ...], tuple[Group, ...]]:
    """Return each rank's buddies, and the groups of ranks that share a parity. There are none if there is no other node."""
    if settings.ranks_per_parity == 1:
        return choose(settings, state), ()
    living = _living(state)
    return parity_groups.choose(settings, state, living) if len(living) > 1 else ((), ())


def choose(settings: Settings, state: State) -> tuple[tuple[NodeId, ...], ...]:
    """Return the nodes that hold copies of each rank; empty if there is no other node.

    A node that holds copies keeps them unless another is better, since every change sends a whole snapshot.
    """
    living = _living(state)
    replicas = min(settings.replicas, len(living) - 1)
    if replicas < 1:
        return ()
    alike = _alike(state)
    nodes = _Nodes(state, living, most=-(-settings.world_size * replicas // len(living)))
    chosen = []
    for seat in state.seats:
        home = None if seat.node is None else state.nodes.get(seat.node)
        before = state.buddies[seat.rank] if state.buddies else ()
        same = frozenset[NodeId]() if seat.like is None else alike.get(seat.like, frozenset())
        best = list(islice(nodes.preferred(seat.rank, home, before, same), replicas))
        nodes.load(best)
        holders = (node.node for node in best)
        chosen.append(tuple(sorted(holders, key=lambda node: before.index(node) if node in before else len(before))))
    return tuple(chosen)


def _living(state: State) -> dict[NodeId, NodeRecord]:
    """Return the nodes that can hold copies: not those that were drained."""
    return {node: record for node, record in state.nodes.items() if not state.is_left(node)}


class _Nodes:
    """All nodes that can hold copies: those with memory for further ones, and those without."""

    def __init__(self, state: State, living: Mapping[NodeId, NodeRecord], most: int) -> None:
        """Begin without copies. A node with `most` copies has its share."""
        self._state = state
        self._short = frozenset(node for node in state.shortages if node in living and shortages.is_short(state, node))
        copies = dict.fromkeys(living, 0)
        with_memory = [node for node in living.values() if node.node not in self._short]
        without_memory = [living[node] for node in self._short]
        self._with_memory = _Ring(living, state.arrivals, with_memory, copies, most)
        self._without_memory = _Ring(living, state.arrivals, without_memory, copies, most)

    def load(self, nodes: Iterable[NodeRecord]) -> None:
        """Add a copy to each of these nodes."""
        for node in nodes:
            (self._without_memory if node.node in self._short else self._with_memory).load(node)

    def preferred(
        self, rank: Rank, home: NodeRecord | None, before: tuple[NodeId, ...], alike: frozenset[NodeId]
    ) -> Iterator[NodeRecord]:
        """Yield the nodes for copies of the rank, the best first.

        Nodes with memory come first. A node without keeps the copies that it holds, unless it has refused the rank's.
        """
        if not self._short:
            yield from self._with_memory.preferred(home, before, alike)
            return
        kept = tuple(node for node in before if shortages.keeps(self._state, node, rank))
        with_memory = frozenset(node for node in alike if node not in self._short or node in kept)
        yield from self._with_memory.preferred(home, kept, with_memory)
        refused = tuple(node for node in before if node not in kept)
        for node in self._without_memory.preferred(home, refused, alike & self._short):
            if node.node not in kept:
                yield node


class _Ring:
    """Some nodes by number of copies, then in order of arrival, so that a choice looks at few of them."""

    def __init__(
        self,
        living: Mapping[NodeId, NodeRecord],
        arrivals: int,
        nodes: Iterable[NodeRecord],
        copies: dict[NodeId, int],
        most: int,
    ) -> None:
        """Begin without copies. `copies` counts those of all `living` nodes. A node with `most` copies has its share."""
        self._living = living
        self._arrivals = arrivals
        self._most = most
        self._copies = copies
        self._by_arrival = {node.arrival: node for node in nodes}
        self._with = {0: sorted(self._by_arrival)}
        """By number of copies, the arrivals of the nodes with so many."""

    def load(self, node: NodeRecord) -> None:
        """Add a copy to one of these nodes."""
        copies = self._copies[node.node]
        self._copies[node.node] = copies + 1
        left = self._with[copies]
        del left[bisect_left(left, node.arrival)]
        if not left:
            del self._with[copies]
        insort(self._with.setdefault(copies + 1, []), node.arrival)

    def preferred(
        self, home: NodeRecord | None, before: tuple[NodeId, ...], alike: frozenset[NodeId]
    ) -> Iterator[NodeRecord]:
        """Yield first the nodes in other failure domains that are alike, then all others, in the order of `best`."""
        first: list[NodeRecord] = []
        for node in self._few(home, before, alike) if len(alike) <= _FEW else self.best(home, before):
            if node.node in alike and node is not home and not _is_near(node, home):
                first.append(node)
                yield node
        for node in self.best(home, before):
            if node not in first:
                yield node

    def _few(self, home: NodeRecord | None, before: tuple[NodeId, ...], nodes: Iterable[NodeId]) -> list[NodeRecord]:
        """Return these nodes, the best first, without looking at the others."""
        start = 0 if home is None else home.arrival + 1

        def worth(node: NodeRecord) -> tuple[bool, bool, int, int]:
            copies = self._copies[node.node]
            return copies >= self._most, node.node not in before, copies, self._distance(node, start)

        return sorted((self._living[node] for node in nodes if node in self._living), key=worth)

    def best(self, home: NodeRecord | None, before: tuple[NodeId, ...]) -> Iterator[NodeRecord]:
        """Yield these nodes and those in `before`, but not the rank's home, the best first.

        Nodes in another failure domain come first, then nodes below their share, then present holders of the rank's copies,
        then nodes with the fewest copies, and last the order of the ring after home.
        """
        start = 0 if home is None else home.arrival + 1
        kept = [self._living[node] for node in before if node in self._living]
        kept = [node for node in dict.fromkeys(kept) if node is not home]
        kept.sort(key=lambda node: (self._copies[node.node], self._distance(node, start)))
        for near in (False, True):
            if near and not (home is not None and home.place.failure_domain):
                return
            for full in (False, True):
                here = [
                    node
                    for node in kept
                    if (self._copies[node.node] >= self._most) is full and _is_near(node, home) is near
                ]
                yield from here
                for node in self._around(start, full=full):
                    if node is not home and _is_near(node, home) is near and node not in here:
                        yield node

    def _distance(self, node: NodeRecord, start: int) -> int:
        """Return how far along the ring a node is from there."""
        return (node.arrival - start) % (self._arrivals + 1)

    def _around(self, start: int, *, full: bool) -> Iterator[NodeRecord]:
        """Yield the nodes with their share, or those below it, by number of copies and then from `start` on."""
        for copies in sorted(self._with):
            if (copies >= self._most) is full:
                arrivals = self._with[copies]
                first = bisect_left(arrivals, start)
                for arrival in chain(islice(arrivals, first, None), islice(arrivals, first)):
                    yield self._by_arrival[arrival]


def _alike(state: State) -> dict[Rank, frozenset[NodeId]]:
    """Return the nodes whose ranks hold the same parameters, by the lowest of these ranks."""
    found: dict[Rank, set[NodeId]] = {}
    for seat in state.seats:
        if seat.like is not None and seat.node is not None:
            found.setdefault(seat.like, set()).add(seat.node)
    return {rank: frozenset(nodes) for rank, nodes in found.items()}


def _is_near(node: NodeRecord, home: NodeRecord | None) -> bool:
    return (
        home is not None and bool(node.place.failure_domain) and node.place.failure_domain == home.place.failure_domain
    )
