"""The leader's last messages to each node, so that it sends only news. No I/O."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from deadpool_run.core.copies.commit import Commits
from deadpool_run.core.copies.parity_groups import Group
from deadpool_run.core.state import State
from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.wire.peers import Buddies, Committed, Peer, Safe

_TERM_SHIFT = 32
"""Other numbers are used in other terms."""


class Tracking:
    """Which snapshots are safe, and which node holds copies of which rank: as it is, and as it was last sent."""

    def __init__(self, world_size: int) -> None:
        self.commits = Commits(world_size)
        self.committed: Committed | None = None
        """The commits, as every node has them."""
        self._buddies: dict[NodeId, Buddies] = {}
        self._number = 0
        self._copied_to: tuple[tuple[NodeId, ...], ...] = ()
        self._groups: dict[Rank, Group] = {}
        self._protected = False

    def new_timeline(self, timeline: int, rollback: Version | None) -> None:
        """Restart counting: from nothing, or after a rollback to this version."""
        if rollback is None:
            self._protected = False
            self.commits.begin(timeline)
        else:
            self.commits.discard_above(timeline, rollback)

    def is_current(self, state: State, node: NodeId, safe: Safe) -> bool:
        """Return whether a node's report counts: the rank lives there, and the holders are those that the node was sent last.

        A node knows late that a rank has left, or has other holders. The former ones may drop their copies once the report counts.
        """
        last = self._buddies.get(node)
        is_rank = 0 <= safe.rank < len(state.seats) and state.seats[safe.rank].node == node
        return is_rank and last is not None and last.number == safe.buddies

    def committed_news(self, timeline: int) -> Committed | None:
        """Return the commits if they changed since they were last sent, else None."""
        newest = -1 if self.commits.committed is None else self.commits.committed
        news = Committed(timeline, newest, tuple(sorted(self.commits.abandoned)))
        if news == self.committed:
            return None
        self.committed = news
        return news

    def is_news_of_protection(self) -> bool:
        """Return whether this is the first call in the generation."""
        first, self._protected = not self._protected, True
        return first

    def buddies_news(self, state: State, peer: Callable[[NodeId], Peer | None]) -> Iterator[tuple[NodeId, Buddies]]:
        """Yield each node whose buddies or copies changed since they were last sent, with all of them."""
        before, self._copied_to = self._copied_to, state.buddies
        grouped_before, self._groups = self._groups, {rank: group for group in state.parity_groups for rank in group}
        for rank, new in enumerate(state.buddies):
            regrouped = grouped_before.get(Rank(rank)) != self._groups.get(Rank(rank))
            if not before or regrouped or not set(new) <= set(before[rank]):
                self.commits.replaced(Rank(rank))
        mine: dict[NodeId, dict[Rank, tuple[Peer, ...]]] = defaultdict(dict)
        keep: dict[NodeId, list[Rank]] = defaultdict(list)
        for seat in state.seats:
            holders = state.buddies[seat.rank] if state.buddies else ()
            former = state.former_buddies[seat.rank] if state.former_buddies else ()
            if seat.node is not None and seat.node in state.nodes:
                peers = (peer(holder) for holder in holders if holder != seat.node)
                mine[seat.node][seat.rank] = tuple(found for found in peers if found is not None)
            for holder in dict.fromkeys((*holders, *former)):
                keep[holder].append(seat.rank)
        # A message of an earlier term may have been lost with its connection.
        of_term = {node: last for node, last in self._buddies.items() if last.number >> _TERM_SHIFT == state.term}
        self._buddies = {node: last for node, last in of_term.items() if node in state.nodes}
        for node in state.nodes:
            groups = {self._groups[rank] for rank in (*mine[node], *keep[node]) if rank in self._groups}
            last = self._buddies.get(node)
            number = 0 if last is None else last.number
            news = Buddies(dict(mine[node]), tuple(keep[node]), tuple(sorted(groups)), number)
            # A new leader tells all of them: a node may have had a rank, and has none now.
            if news != last:
                self._number += 1
                news = self._buddies[node] = replace(news, number=(state.term << _TERM_SHIFT) + self._number)
                yield node, news
