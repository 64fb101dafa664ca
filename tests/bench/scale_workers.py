"""The workers of one node of the benchmark `scale`. They obey at once, and report as real ones do."""

from collections.abc import Iterator

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.effects import Effect
from deadpool_run.ids import Epoch, NodeId, Rank, Version, WorkerId
from deadpool_run.wire import peers

HELD = (Version(0), Version(1))
"""The versions that every rank holds in its slots and on its buddies."""


class BenchWorkers:
    """A node's workers, by id."""

    def __init__(self, node: NodeId) -> None:
        self.node = node
        self.timeline = 0
        self._ranks: dict[WorkerId, tuple[Rank, Epoch]] = {}
        self._started: list[WorkerId] = []
        self._rehearsing: set[WorkerId] = set()
        self._copies: tuple[Rank, ...] = ()

    def obey(self, order: Effect) -> Iterator[ev.Event]:
        """Yield the node's reports after an order."""
        match order:
            case do.StartWorker(worker):
                self._started.append(worker)
                yield ev.WorkerStarted(worker, 1000 + worker)
                yield ev.WorkerReady(worker)
            case do.AssignRank(worker, rank, epoch, replacement):
                self._ranks[worker] = (rank, epoch)
                if replacement:
                    self._rehearsing.add(worker)
                    yield ev.ReplacementRehearsed(worker, epoch)
                else:
                    yield ev.ScriptInitialized(worker)
                    yield ev.SetupCompleted(worker)
                    yield ev.TranscriptCompleted(worker)
            case do.AbortStep(worker, epoch) if worker in self._rehearsing:
                yield ev.ReplacementRehearsed(worker, epoch)
            case do.AbortStep(worker, epoch):
                yield ev.AbortCompleted(worker, epoch, HELD[1], HELD[1], HELD)
            case do.ReportReplicas(_, rank, epoch):
                yield ev.ReplicasReported(self.node, rank, epoch, HELD if rank in self._copies else ())
            case do.ResumeFrom(worker, epoch):
                self._rehearsing.discard(worker)
                yield ev.RankRestored(worker, epoch)
            case do.AttachGroups(worker, epoch):
                yield ev.RankAttached(worker, epoch)
                yield ev.FirstStepCompleted(worker, epoch)
            case _:
                pass

    def copy(self, buddies: peers.Buddies) -> Iterator[peers.Safe]:
        """Yield the node's reports after its ranks' snapshots have arrived at their buddies."""
        self._copies = buddies.keep
        for rank in buddies.mine:
            yield peers.Safe(self.timeline, rank, HELD, transcript=True, buddies=buddies.number)

    def ranks(self) -> list[Rank]:
        """Return the ranks here."""
        return [rank for rank, _ in self._ranks.values()]

    def found(self) -> ev.NodeResynced:
        """Return the inventory for a new leader."""
        nobody = (Rank(-1), Epoch(-1))
        found = [
            ev.WorkerFound(
                worker, 1000 + worker, *self._ranks.get(worker, nobody), ready=True, initialized=True, interval=1
            )
            for worker in self._started
        ]
        return ev.NodeResynced(self.node, tuple(found), holds=(*self.ranks(), *self._copies))
