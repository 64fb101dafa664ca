"""Choice of the ranks that share a parity, and of the node that keeps it.

The ranks of a group live on different nodes and its parity is on another one, if possible all in different failure domains:
the loss of one node, or of one domain, takes at most one of them. Groups of ranks that have not moved stay as they are, since
a new parity needs the snapshots of all its ranks.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet

from deadpool_run.core.copies import shortages
from deadpool_run.core.settings import MAX_GROUP, Settings
from deadpool_run.core.state import NodeRecord, State
from deadpool_run.ids import NodeId, Rank

Group = tuple[Rank, ...]
"""Ranks that share a parity, in ascending order."""
_LOOKED_AT = 4
"""For each rank of a group, at most so many nodes of known failure domains are passed over for one of another domain."""


def choose(
    settings: Settings, state: State, living: Mapping[NodeId, NodeRecord]
) -> tuple[tuple[tuple[NodeId, ...], ...], tuple[Group, ...]]:
    """Return each rank's holder, and the groups of more than one rank. `living` are the nodes that can hold something."""
    home = {seat.rank: seat.node for seat in state.seats if seat.node is not None and seat.node in living}
    most = min(settings.ranks_per_parity, len(living) - 1)
    groups = list(state.parity_groups)
    while (formed := _groups(groups, home, living, most)) != groups:
        groups = formed  # fewer each time
    before = {seat.rank: buddies[0] for seat, buddies in zip(state.seats, state.buddies, strict=False) if buddies}
    while (holders := _holders(groups, home, before, state, living)) != before:
        before = holders  # each change evens them out
    buddies = tuple((holders[seat.rank],) if seat.rank in holders else () for seat in state.seats)
    return buddies, tuple(group for group in groups if len(group) > 1)


def _groups(
    before: Iterable[Group], home: Mapping[Rank, NodeId], living: Mapping[NodeId, NodeRecord], most: int
) -> list[Group]:
    """Return all ranks in groups. Small groups of before are broken up only if that makes fewer."""
    apart = [group for group in before if 1 < len(group) <= most and _are_apart(group, home)]
    full, small = ([group for group in apart if (len(group) == most) is is_full] for is_full in (True, False))
    kept = [*small, *_formed(set(home).difference(*apart), home, living, most)]
    regrouped = list(_formed(set(home).difference(*full), home, living, most))
    return sorted([*full, *(regrouped if len(regrouped) < len(kept) else kept)])


def _are_apart(group: Group, home: Mapping[Rank, NodeId]) -> bool:
    nodes = {home.get(rank) for rank in group}
    return None not in nodes and len(nodes) == len(group)


def _formed(
    ranks: Iterable[Rank], home: Mapping[Rank, NodeId], living: Mapping[NodeId, NodeRecord], most: int
) -> Iterator[Group]:
    """Yield groups of up to `most` of these ranks, each on another node: always from the nodes with the most ranks left."""
    on_node: dict[NodeId, list[Rank]] = defaultdict(list)
    for rank in sorted(ranks, reverse=True):
        on_node[home[rank]].append(rank)
    queue = [(-len(own), living[node].arrival, node) for node, own in on_node.items()]
    heapq.heapify(queue)
    while queue:
        chosen = _apart(queue, living, most)
        yield tuple(sorted(on_node[node].pop() for _, _, node in chosen))
        for count, arrival, node in chosen:
            if count < -1:
                heapq.heappush(queue, (count + 1, arrival, node))


def _apart(
    queue: list[tuple[int, int, NodeId]], living: Mapping[NodeId, NodeRecord], most: int
) -> list[tuple[int, int, NodeId]]:
    """Take up to `most` entries from the queue, the first ones that are in different failure domains, else the first ones."""
    chosen: list[tuple[int, int, NodeId]] = []
    passed: list[tuple[int, int, NodeId]] = []
    domains = set[str]()
    while queue and len(chosen) < most and len(passed) < _LOOKED_AT * most:
        entry = heapq.heappop(queue)
        domain = living[entry[2]].place.failure_domain
        if domain and domain in domains:
            passed.append(entry)
        else:
            domains.add(domain)
            chosen.append(entry)
    while passed and len(chosen) < most:
        chosen.append(passed.pop(0))
    while queue and len(chosen) < most:
        chosen.append(heapq.heappop(queue))
    for entry in passed:
        heapq.heappush(queue, entry)
    return chosen


def _holders(
    groups: list[Group],
    home: Mapping[Rank, NodeId],
    present: Mapping[Rank, NodeId],
    state: State,
    living: Mapping[NodeId, NodeRecord],
) -> dict[Rank, NodeId]:
    """Return the node that holds each rank's parity. One that holds it already keeps it, up to its share."""
    short = {node for node in state.shortages if node in living and shortages.is_short(state, node)}
    with_memory = living.keys() - short or living.keys()
    share = -(-len(groups) // len(with_memory))
    held = dict.fromkeys(living, 0)
    found: dict[Rank, NodeId] = {}

    def hold(group: Group, node: NodeId) -> None:
        held[node] += 1
        found.update(dict.fromkeys(group, node))

    others = []
    for group in groups:
        before = {present.get(rank) for rank in group}
        holder = before.pop() if len(before) == 1 else None
        nodes = {home[rank] for rank in group}
        if holder not in with_memory or holder in nodes:
            holder = None
        if holder is not None and held[holder] < share:
            hold(group, holder)
        else:
            others.append((group, nodes, holder))
    queue = [(held[node], living[node].arrival, node) for node in with_memory]
    heapq.heapify(queue)
    for group, nodes, holder in others:
        node = _fewest(queue, held, nodes, living)
        if node is not None and holder is not None and held[node] >= share:
            node = holder  # another one would have as many
        if node is None:  # only nodes without memory are left
            node = min(
                (each for each in living if each not in nodes), key=lambda each: (held[each], living[each].arrival)
            )
        hold(group, node)
        if node in with_memory:
            heapq.heappush(queue, (held[node], living[node].arrival, node))
    return found


def _fewest(
    queue: list[tuple[int, int, NodeId]],
    held: Mapping[NodeId, int],
    nodes: AbstractSet[NodeId],
    living: Mapping[NodeId, NodeRecord],
) -> NodeId | None:
    """Return the node with the fewest parities that is none of these, if possible in none of their failure domains.

    Entries of the queue with another number than the node has now are old.
    """
    near = {living[node].place.failure_domain for node in nodes} - {""}
    passed: list[tuple[int, int, NodeId]] = []
    found = None
    while queue and found is None and len(passed) <= _LOOKED_AT * MAX_GROUP:
        entry = heapq.heappop(queue)
        if entry[0] != held[entry[2]]:
            continue
        passed.append(entry)
        if entry[2] not in nodes and living[entry[2]].place.failure_domain not in near:
            found = entry[2]
    if found is None:
        found = next((node for _, _, node in passed if node not in nodes), None)
    for entry in passed:
        heapq.heappush(queue, entry)
    return found
