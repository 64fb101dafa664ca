"""What one machine contributes to a job: its workers, their memory, and copies of others' snapshots. Decides nothing.

The leader is above it, in this process or on another node: facts go up, orders come down.
"""

from typing import Protocol, assert_never

from deadpool_run.agent.checkpoint.checkpointer import Checkpointers
from deadpool_run.agent.checkpoint.participant import CheckpointParticipant
from deadpool_run.agent.node.copies import Copies
from deadpool_run.agent.node.inventory import Inventory
from deadpool_run.agent.node.orders import OrderPerformer, Situation
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.workers import Workforce
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.core import effects as do
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import (
    CaptureSkipped,
    Event,
    LoopFinished,
    NodeResynced,
    ReplicasReported,
    TranscriptSealed,
    WorkerExited,
)
from deadpool_run.ids import Rank, Version, WorkerId
from deadpool_run.vault.vault import Vault
from deadpool_run.wire import peers
from deadpool_run.wire.checkpoints import DEFAULT_DURABLE_TIMEOUT_S
from deadpool_run.wire.peers import Buddies, Committed, Loaded, Peer, PreemptionNotice, Safe, Saved, Traffic, World


class Above(Protocol):
    """The leader, seen from a node."""

    def fact(self, event: Event) -> None:
        """Handle what has happened on the node."""

    def safe(self, safe: Safe) -> None:
        """Handle what other nodes hold of one of the node's ranks."""

    def durable_news(self, news: Saved | Loaded | PreemptionNotice) -> None:
        """Handle the node's news of durable checkpoints."""


class LocalNode:
    """One membership of a node in the job. A new leader replaces `above`."""

    def __init__(  # noqa: PLR0913 - the parts of a machine's launch
        self,
        spec: LaunchSpec,
        situation: Situation,
        *,
        forkserver: ForkServer,
        output: Logs,
        mark: dict[str, str],
        above: Above,
    ) -> None:
        self.above = above
        self.situation = situation
        vault = self.vault = Vault(spec.settings.world_size)
        self.copies: Copies | None = None
        self._root_cause = output.root_cause
        self._timeline = self._world_timeline = 0
        self._inventory = Inventory()
        self._safe: dict[Rank, Safe] = {}
        self._finished: dict[Rank, LoopFinished] = {}
        self._workforce = Workforce(forkserver, self._submit, vault.captured, self._captured)
        timeout_s = DEFAULT_DURABLE_TIMEOUT_S if spec.durable is None else spec.durable.timeout_s
        self.checkpointers = Checkpointers(forkserver, vault, timeout_s)
        self._participant = CheckpointParticipant(
            self.checkpointers, vault, spec.run_id, self._durable_news, self._captured
        )
        self.newest_durable: peers.Durable | None = None
        """The newest durable checkpoint of the job, as its leader has reported it."""
        self._performer = OrderPerformer(
            spec=spec,
            participant=self._participant,
            situation=situation,
            mark=mark,
            workforce=self._workforce,
            vault=vault,
            output=output,
            copies=lambda: self.copies,
            fetch_failed=self._submit,
        )

    # --- orders -------------------------------------------------------------------------------------------------

    def set_world(self, world: World) -> None:
        """Set the world that assignments refer to from now on."""
        self._world_timeline = world.timeline
        self._performer.set_world(world)

    def perform(self, effect: Effect, capture_interval: int, source: Peer | None) -> None:
        """Carry out one order for this node."""
        self._inventory.ordered(effect)
        match effect:
            case do.ReportReplicas(node, rank, epoch):
                held = () if self.copies is None else self.copies.versions(rank)
                self._submit(ReplicasReported(node, rank, epoch, held))
            case do.DiscardAbove(epoch, version):
                if epoch > self._timeline:  # else the order is a repeated one
                    self._begin_timeline(epoch)
                    if self.copies is not None:
                        self.copies.discard_above(epoch, version)
            case do.BeginGeneration():
                self._begin_timeline(self._world_timeline)
                self._performer.perform(effect, capture_interval, source)
                if self.copies is not None:
                    self.vault.status_page.publish(None, ())  # over several nodes the leader tells what is committed
            case _:
                self._performer.perform(effect, capture_interval, source)

    def _begin_timeline(self, timeline: int) -> None:
        """Forget what was safe: it is of a timeline that was abandoned."""
        self._timeline = timeline
        self._safe.clear()
        self._finished.clear()

    def set_buddies(self, buddies: Buddies) -> None:
        """Set the nodes to send copies to, and the ranks to hold copies of."""
        if self.copies is None:
            return
        for rank in self.copies.local_ranks() - buddies.mine.keys():  # also of replacements that were ended here
            self.copies.left(rank)
        self.copies.keep(buddies.keep)
        self.copies.set_buddies(buddies.mine)
        self.copies.report_all()  # earlier reports were of former buddies, or went to another leader

    def committed(self, committed: Committed) -> None:
        """Tell the node's workers which of their snapshots are needed."""
        if committed.timeline == self._timeline:
            self.vault.status_page.publish(
                Version(committed.version) if committed.version >= 0 else None, committed.abandoned
            )

    def void_checkpoints(self) -> None:
        """End what the last leader ordered of durable checkpoints."""
        self._participant.void()

    def durable_order(self, order: peers.Save | peers.Void | peers.Load | peers.Durable) -> None:
        """Do this node's part of durable checkpoints."""
        match order:
            case peers.Save():
                self._participant.save(order)
            case peers.Void(attempt):
                self._participant.void(attempt)
            case peers.Load():
                self._participant.load(order)
            case peers.Durable():
                self.newest_durable = order
            case _:
                assert_never(order)

    @property
    def timeline(self) -> int:
        """The newest timeline that the node knows."""
        return self._timeline

    # --- status -------------------------------------------------------------------------------------------------

    def pid(self, worker: WorkerId) -> int | None:
        """Return the process of a worker that lives here."""
        return self._workforce.pid(worker)

    def rank_entries(self) -> tuple[tuple[int, ...], ...]:
        """Return the status page's entries of the ranks here: the rank, then the entry's words."""
        return tuple((rank, *self.vault.status_page.rank_entries[rank].words()) for rank in self._workforce.ranks())

    def traffic(self) -> Traffic | None:
        """Return the traffic of copies between this node and others; None if nothing is copied."""
        if self.copies is None:
            return None
        report = self.copies.status()
        return Traffic(**{name: report[name] for name in Traffic.__struct_fields__})

    def resynced(self) -> NodeResynced:
        """Return the inventory, which a new leader asks for first."""
        return self._inventory.report(self.situation.node)

    # --- the end ------------------------------------------------------------------------------------------------

    def end_workers(self) -> None:
        """End every worker at once. Their exits are still reaped by the loop."""
        self._workforce.close()
        self._participant.void()

    def close(self) -> None:
        """Free all memory, after the last worker is gone."""
        if self.copies is not None:
            self.copies.close()
        self.vault.close()

    # --- facts --------------------------------------------------------------------------------------------------

    def replicated(self, rank: Rank, versions: tuple[Version, ...], transcript: bool, timeline: int) -> None:
        """Report what other nodes hold of a rank that lives here."""
        if timeline != self._timeline:
            return
        safe = self._safe[rank] = Safe(timeline, rank, versions, transcript)
        self.above.safe(safe)
        waiting = self._finished.get(rank)
        if waiting is not None and waiting.version in versions:
            del self._finished[rank]
            self.above.fact(waiting)

    def _durable_news(self, news: peers.Saved | peers.Loaded) -> None:
        self.above.durable_news(news)

    def _captured(self, rank: Rank, version: Version) -> None:
        if self.copies is not None:
            self.copies.captured(rank, version)

    def _submit(self, event: Event) -> None:
        """Submit a fact. The end of a rank's loop waits until its last snapshot is safe from the loss of this node."""
        self._inventory.reported(event)
        if isinstance(event, WorkerExited):
            self._root_cause.ended(event.worker, event.code, event.signal)
        if self.copies is not None and isinstance(event, CaptureSkipped):
            self.copies.skipped()
        if self.copies is not None and isinstance(event, TranscriptSealed | LoopFinished):
            rank = self._workforce.rank(event.worker)
            if rank is not None and isinstance(event, TranscriptSealed):
                self.copies.sealed(rank)
            elif rank is not None and isinstance(event, LoopFinished) and not self._is_safe(rank, event.version):
                self._finished[rank] = event
                return
        self.above.fact(event)

    def _is_safe(self, rank: Rank, version: Version) -> bool:
        return rank in self._safe and version in self._safe[rank].versions
