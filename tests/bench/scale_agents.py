"""The nodes of the scale benchmark: agents that obey at once. What they hear and say is bytes, cut and checked as in a job."""

from collections.abc import Iterator

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.effects import Effect
from deadpool_run.ids import NodeId, Rank, Version, WorkerId
from deadpool_run.vault.status_page import WORDS
from deadpool_run.wire import peers
from deadpool_run.wire.frames import Frames


class Agents:
    """Every node's agent and its workers."""

    def __init__(self) -> None:
        self.ranks: dict[WorkerId, Rank] = {}
        self.stand = 1
        """The newest version that every rank holds; it holds the one before it too."""
        self._rehearsing: set[WorkerId] = set()
        self._timeline = 0
        self._frames: dict[NodeId, Frames] = {}

    def hear(self, node: NodeId, data: bytes) -> Iterator[bytes]:
        """Yield what the node says to what it hears."""
        for body in self._frames.setdefault(node, Frames(peers.MAX_FRAME_BYTES)).feed(data):
            message = peers.decode(body)
            if isinstance(message, peers.World):
                self._timeline = message.timeline
            elif isinstance(message, peers.Order):
                for answer in self._obey(node, message.effect):
                    yield peers.encode(peers.Fact(answer) if isinstance(answer, ev.Event) else answer)

    def _obey(self, node: NodeId, order: Effect) -> Iterator[ev.Event | peers.Safe]:
        held = (Version(self.stand - 1), Version(self.stand))
        match order:
            case do.StartWorker(worker):
                yield ev.WorkerStarted(worker, 1000 + worker)
                yield ev.WorkerReady(worker)
            case do.AssignRank(worker, rank, epoch, replacement):
                self.ranks[worker] = rank
                if replacement:
                    self._rehearsing.add(worker)
                    yield ev.ReplacementRehearsed(worker, epoch)
                else:
                    yield ev.ScriptInitialized(worker)
                    yield ev.SetupCompleted(worker)
                    yield ev.TranscriptSealed(worker)
                    yield self.safe(worker)
            case do.AbortStep(worker, epoch) if worker in self._rehearsing:
                yield ev.ReplacementRehearsed(worker, epoch)
            case do.AbortStep(worker, epoch):
                yield ev.SurvivorDrained(worker, epoch, held[1], held[1], held)
            case do.ReportReplicas(_, rank, epoch):
                yield ev.ReplicasReported(node, rank, epoch, held)
            case do.ResumeFrom(worker, epoch):
                self._rehearsing.discard(worker)
                yield ev.RankRestored(worker, epoch)
            case do.AttachGroups(worker, epoch):
                yield ev.RankAttached(worker, epoch)
                yield ev.FirstStepCompleted(worker, epoch)
            case _:
                pass

    def safe(self, worker: WorkerId) -> peers.Safe:
        """Return what is said when a snapshot has arrived at the rank's buddies."""
        return peers.Safe(self._timeline, self.ranks[worker], (self.stand - 1, self.stand), transcript=True)


def heartbeat_ack(ranks: list[Rank]) -> bytes:
    """Return a sign of life of a node with these ranks."""
    return peers.encode(peers.HeartbeatAck(0, 0.0, 1, rank_entries=tuple((rank, *[1 << 30] * WORDS) for rank in ranks)))
