"""Ends of loops that wait for a copy: a rank's loop has ended once its last snapshot is on other nodes."""

import asyncio
from collections.abc import Callable

from deadpool_run.core.events import LoopFinished
from deadpool_run.ids import Rank
from deadpool_run.wire.peers import Fact, Safe

_WITHOUT_COPY_S = 5.0
"""How long the end of a rank's loop waits for its last copy while the node that should have it has no memory."""


class AwaitedCopies:
    """The last copies of ranks whose loop has ended here. For the event loop."""

    def __init__(self, report: Callable[[Fact], None], is_refused: Callable[[Rank], bool]) -> None:
        """`is_refused`: whether a buddy of the rank has had no memory for its copies for a while."""
        self._report, self._is_refused = report, is_refused
        self._safe: dict[Rank, Safe] = {}
        self._finished: dict[Rank, LoopFinished] = {}

    def begin(self) -> None:
        """Begin a timeline: what was safe in the last one does not count."""
        self._safe.clear()
        self._finished.clear()

    def replicated(self, rank: Rank, safe: Safe) -> None:
        """Note what other nodes hold of a rank, and report the end of its loop if that has waited for it."""
        self._safe[rank] = safe
        waiting = self._finished.get(rank)
        if waiting is not None and waiting.version in safe.versions:
            del self._finished[rank]
            self._report(Fact(waiting))

    def must_wait(self, rank: Rank, event: LoopFinished) -> bool:
        """Return whether the end of the rank's loop waits for a copy. It is reported later then."""
        safe = self._safe.get(rank)
        if safe is not None and event.version in safe.versions:
            return False
        self._finished[rank] = event
        self.limit_wait(rank)
        return True

    def limit_wait(self, rank: Rank) -> None:
        """Bound the wait for the copy of a rank whose loop has ended: its buddy may never have memory."""
        waiting = self._finished.get(rank)
        if waiting is not None and self._is_refused(rank):
            asyncio.get_running_loop().call_later(_WITHOUT_COPY_S, self._do_without_copy, rank, waiting)

    def _do_without_copy(self, rank: Rank, waiting: LoopFinished) -> None:
        """Report the end of the rank's loop, unless another node has been chosen for the copy meanwhile."""
        if self._finished.get(rank) is waiting and self._is_refused(rank):
            del self._finished[rank]
            self._report(Fact(waiting))
