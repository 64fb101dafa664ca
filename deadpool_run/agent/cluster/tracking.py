"""What the coordinator's agent has told which node, so that each is told only what is new to it. No I/O."""

from collections import defaultdict
from collections.abc import Callable, Iterator

from deadpool_run.core.copies.commit import Commits
from deadpool_run.core.state import State
from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.wire.peers import Buddies, Committed, Peer

_NOTHING = Buddies({}, ())


class Tracking:
    """Which snapshots are safe, and who holds copies of whose: as it is, and as it was last told."""

    def __init__(self, world_size: int) -> None:
        self.commits = Commits(world_size)
        self.committed: Committed | None = None
        """What every node was told of the commits."""
        self._buddies: dict[NodeId, Buddies] = {}
        self._copied_to: tuple[tuple[NodeId, ...], ...] = ()
        self._protected = False

    def new_timeline(self, timeline: int, rollback: Version | None) -> None:
        """Count anew: from the top, or after a rollback to this version."""
        if rollback is None:
            self._protected = False
            self.commits.begin(timeline)
        else:
            self.commits.discard_above(timeline, rollback)

    def committed_news(self, timeline: int) -> Committed | None:
        """Return what every node is to know of the commits; None if they do."""
        newest = -1 if self.commits.committed is None else self.commits.committed
        told = Committed(timeline, newest, tuple(sorted(self.commits.abandoned)))
        if told == self.committed:
            return None
        self.committed = told
        return told

    def is_news_of_protection(self) -> bool:
        """Whether this is the first time in the generation that one asks."""
        first, self._protected = not self._protected, True
        return first

    def buddies_news(self, state: State, peer: Callable[[NodeId], Peer | None]) -> Iterator[tuple[NodeId, Buddies]]:
        """Yield each node that is to send or to hold something else than it was told, with all of what it now is."""
        before, self._copied_to = self._copied_to, state.buddies
        for rank, new in enumerate(state.buddies):
            if not before or not set(new) <= set(before[rank]):
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
        self._buddies = {node: told for node, told in self._buddies.items() if node in state.nodes}
        for node in state.nodes:
            told = Buddies(dict(mine[node]), tuple(keep[node]))
            if told != self._buddies.get(node, _NOTHING):
                self._buddies[node] = told
                yield node, told
