"""A worker, as its agent describes it to a new leader, and the orders to discard that have reached the agent."""

from deadpool_run.ids import Epoch, Version, WorkerId
from deadpool_run.structs import Untagged

Discards = tuple[tuple[Epoch, Version], ...]
"""The epochs and versions of orders to discard, the oldest first."""

_NO_EPOCH = Epoch(0)


class WorkerFound(Untagged):
    """A worker of an agent's inventory. Exactly one of `code` and `signal` is set once it has ended.

    `pid` is None while it is being started. `rank` is its rank, -1 if none, and `epoch` the epoch of the order that gave it the rank.
    """

    worker: WorkerId
    pid: int | None
    rank: int = -1
    epoch: Epoch = _NO_EPOCH
    ready: bool = False
    initialized: bool = False
    """Its script called `init()`."""
    rehearsed: bool = False
    """It reported `ReplacementRehearsed`: its set-up is complete, and no longer needs the store of that time."""
    reentering: bool = False
    """It was ordered to run its script again, and has not reported `RankRestored` since. `rehearsed` is of that run."""
    finished: bool = False
    """It reported `LoopFinished`, and was not ordered to abort its step since."""
    released: bool = False
    """It was ordered to leave its loop."""
    dismissed: bool = False
    """It holds no rank, and was ordered to exit."""
    prepared: bool = False
    """It was ordered to rehearse ahead of need, and may have done so. What got no transcript is parked again, and false."""
    interval: int = 0
    """Steps between its snapshots, by the last order that reached it."""
    code: int | None = None
    signal: int | None = None

    @property
    def alive(self) -> bool:
        """Tell whether the process has not ended."""
        return self.code is None and self.signal is None


def with_discard(discards: Discards, epoch: Epoch, version: Version) -> Discards:
    """Return the orders with this one, and without those that it covers. A repeated order changes nothing."""
    if discards and epoch <= discards[-1][0]:
        return discards
    return *(each for each in discards if each[1] < version), (epoch, version)
