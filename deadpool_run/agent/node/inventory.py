"""Inventory of a node's workers, of all leaders. A new leader asks for it first."""

from msgspec.structs import replace

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import Event, NodeResynced
from deadpool_run.core.found import Discards, WorkerFound, with_discard
from deadpool_run.core.members import NO_EPOCH, NO_VERSION
from deadpool_run.ids import Epoch, NodeId, Rank, Version, WorkerId

_NONE = NO_EPOCH, NO_VERSION


class Inventory:
    """Every worker of this generation that was to be started here and has not ended, and the last owner of each rank."""

    def __init__(self) -> None:
        self._found: dict[WorkerId, WorkerFound] = {}
        self._discards: Discards = ()
        self._failed_devices: dict[int, str] = {}

    def ordered(self, effect: Effect, capture_interval: int) -> None:  # noqa: C901 - one case for each order
        """Record an order that is carried out. Who is given a rank begins with this interval."""
        match effect:
            case do.BeginGeneration():
                self._found = {worker: found for worker, found in self._found.items() if found.alive}
                self._discards = ()
            case do.DiscardAbove(epoch, version):
                self._discards = with_discard(self._discards, epoch, version)
            case do.StartWorker(worker):
                self._found[worker] = WorkerFound(worker, None)
            case do.AssignRank(worker, rank, epoch):
                self._forget(rank)
                self._change(worker, rank=rank, epoch=epoch, interval=capture_interval)
            case do.SetCaptureInterval(worker, interval):
                self._change(worker, interval=interval)
            case do.AbortStep(worker):
                self._change(worker, finished=False)
            case do.ReEnter(worker):
                self._change(worker, reentering=True, rehearsed=False)
            case do.ReleaseWorker(worker):
                self._change(worker, released=True)
            case do.DismissWorker(worker):
                self._change(worker, dismissed=True)
            case do.PrepareSpare(worker):
                self._change(worker, prepared=True)
            case _:
                pass

    def resume_of(self, epoch: Epoch) -> Version | None:
        """Return the version that ranks resume from in this epoch; None if it is not known yet."""
        discarded_in, version = self._discards[-1] if self._discards else _NONE
        return version if discarded_in == epoch else None

    def reported(self, event: Event) -> None:  # noqa: C901 - one case for each fact
        """Record a fact that is submitted."""
        match event:
            case ev.WorkerStarted(worker, pid):
                self._change(worker, pid=pid)
            case ev.WorkerStartFailed(worker):
                self._found.pop(worker, None)
            case ev.WorkerReady(worker):
                self._change(worker, ready=True)
            case ev.ScriptInitialized(worker):
                self._change(worker, initialized=True)
            case ev.ReplacementRehearsed(worker):
                self._change(worker, rehearsed=True)
            case ev.RankRestored(worker):
                self._change(worker, reentering=False)
            case ev.FetchFailed(worker):  # a spare that got no transcript is parked
                self._change(worker, prepared=False)
            case ev.LoopFinished(worker):
                self._change(worker, finished=True)
            case ev.WorkerExited(worker, code, signal):
                self._change(worker, code=code, signal=signal)
                self._forget(Rank(-1))
            case ev.DeviceFailed(_, local_rank, reason):
                self._failed_devices[local_rank] = reason
            case _:
                pass

    def report(self, node: NodeId, holds: tuple[Rank, ...]) -> NodeResynced:
        """Return the inventory as a fact, with the ranks of which the node's vault has anything."""
        devices = tuple(self._failed_devices.items())
        *earlier, last = self._discards or [_NONE]
        return NodeResynced(node, tuple(self._found.values()), last, holds, devices, tuple(earlier))

    def _forget(self, rank: Rank) -> None:
        """Forget ended workers with this rank; -1: without one."""
        self._found = {worker: found for worker, found in self._found.items() if found.alive or found.rank != rank}

    def _change(self, worker: WorkerId, **changes: object) -> None:
        if worker in self._found:
            self._found[worker] = replace(self._found[worker], **changes)
