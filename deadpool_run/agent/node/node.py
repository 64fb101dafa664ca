"""One machine's part in a job: its workers, their memory, and copies of others' snapshots. Decides nothing.

The leader is above it, in this process or on another node: facts go up, orders come down.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from signal import SIGKILL, Signals
from typing import Protocol

from deadpool_run.agent.checkpoint.checkpointer import Checkpointers
from deadpool_run.agent.checkpoint.participant import CheckpointParticipant
from deadpool_run.agent.console import tell
from deadpool_run.agent.node.assignment import Assignment, worker_environment
from deadpool_run.agent.node.copies import AwaitedCopies
from deadpool_run.agent.node.gpus import GpuWatch
from deadpool_run.agent.node.inventory import Inventory
from deadpool_run.agent.node.rehearsals import Rehearsals
from deadpool_run.agent.node.usage import UsageSampler
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.workers import Workforce
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.core import effects as do
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import (
    CaptureSkipped,
    CopyRefused,
    DeviceFailed,
    Event,
    FetchFailed,
    LoopFinished,
    NodeResynced,
    RefusedCopyTaken,
    ReplicasReported,
    TranscriptCompleted,
    WorkerExited,
)
from deadpool_run.core.injection import KillHow
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.store.socket_owner import SocketOwners, may_use_store
from deadpool_run.vault.segments import create_memory
from deadpool_run.vault.status_page import create_status_page
from deadpool_run.vault.transfer.replicator import Replicator
from deadpool_run.vault.vault import Vault
from deadpool_run.wire import messages, peers
from deadpool_run.wire.checkpoints import DEFAULT_DURABLE_TIMEOUT_S
from deadpool_run.wire.peers import Buddies, Committed, Fact, NodeReport, Peer, Safe, Traffic, World
from deadpool_run.wire.stores import CallersIdentified, IdentifyCallers


class Above(Protocol):
    """The leader, seen from a node."""

    def report(self, report: NodeReport) -> None:
        """Handle what has happened on the node."""


class LocalNode:
    """One membership of a node in the job. A new leader replaces `above`."""

    def __init__(
        self,
        spec: LaunchSpec,
        here: Peer,
        *,
        forkserver: ForkServer,
        output: Logs,
        above: Above,
    ) -> None:
        self.above = above
        self.here = here
        """Where others reach this node's agent, and by its address, an IP literal, its workers."""
        self._spec = spec
        self._output = output
        self._forkserver, self._environment = forkserver, forkserver.environment
        vault = self.vault = Vault(spec.settings.world_size, spec.snapshot_memory)
        self.copies: Replicator | None = None
        """Replication between nodes; None on one machine."""
        self.timeline = 0
        """The newest timeline that the node knows."""
        self._world = World(-1, 0, "", 0)
        self._store_moved = False
        self.suspended = False
        """Whether the workers are stopped, since no leader is heard of."""
        self._inventory = Inventory()
        self._rehearsals = Rehearsals(vault, self._submit)
        self._awaited = AwaitedCopies(
            self._report, lambda rank: self.copies is not None and self.copies.is_refused(rank)
        )
        self._buddies = 0
        """The number of the last `Buddies`."""
        self.workforce = Workforce(forkserver, self._submit, vault.captured, self._captured, output.show_traceback)
        timeout_s = DEFAULT_DURABLE_TIMEOUT_S if spec.durable is None else spec.durable.timeout_s
        self.checkpointers = Checkpointers(forkserver, vault, timeout_s)
        self.participant = CheckpointParticipant(self.checkpointers, vault, self._report, self._captured)
        """This node's part in durable checkpoints."""
        self._gpus = GpuWatch(spec.devices, os.environ.get("CUDA_VISIBLE_DEVICES"), self._gpu_failed)
        self._usage = UsageSampler(self.workforce.processes, lambda: vault.status_page, self._gpus.use)
        self.newest_durable: peers.Durable | None = None
        """The newest durable checkpoint of the job, as its leader has reported it."""

    # --- orders -------------------------------------------------------------------------------------------------

    def set_world(self, world: World) -> None:
        """Set the world of assignments from now on."""
        before, self._world = self._world, world
        if before.store_host and (before.store_host, before.store_port) != (world.store_host, world.store_port):
            self._store_moved = True

    def perform(self, effect: Effect, capture_interval: int, source: Peer | None) -> None:  # noqa: C901, PLR0912, PLR0915 - one case for each order
        """Carry out one order for this node. The leader's own orders never come here."""
        self._inventory.ordered(effect, capture_interval)
        workers = self.workforce
        match effect:
            case do.BeginGeneration(generation):
                self._begin_generation(generation)
            case do.ReportReplicas(node, rank, epoch):
                held = () if self.copies is None else self.copies.versions(rank)
                self._submit(ReplicasReported(node, rank, epoch, held))
            case do.DiscardAbove(epoch, version):
                if epoch > self.timeline:  # else the order is a repeated one
                    self._begin_timeline(epoch)
                    if self.copies is not None:
                        self.copies.discard_above(epoch, version)
            case do.StartWorker(worker):
                workers.start(worker)
            case do.AssignRank(worker):
                self._rehearsals.cancel(worker)
                workers.expect_rank(worker)
                self._seat(effect, capture_interval, source)
            case do.PrepareSpare():
                self._rehearsals.order(
                    effect, source, self.copies, lambda transcript: self._rehearse(effect, capture_interval, transcript)
                )
            case (
                do.AbortStep(worker) | do.SetCaptureInterval(worker) | do.LimitSteps(worker) | do.ReleaseWorker(worker)
            ):
                workers.send(worker, effect)
            case do.ReEnter(worker, epoch):
                workers.send(worker, messages.RunAgain(epoch, *self._moved_store()))
            case do.ResumeFrom():
                self._resume(effect, source)
            case do.AttachGroups(worker, epoch):
                workers.send(worker, messages.Attach(epoch, *self._moved_store()))
            case do.DismissWorker(worker):
                self._rehearsals.cancel(worker)
                workers.dismiss(worker, self._spec.settings.shutdown_timeout_s)
            case do.AbandonWorker(worker):
                workers.abandon(worker)
            case do.KillAgent():
                asyncio.get_running_loop().call_soon(os.kill, os.getpid(), SIGKILL)  # the user gets an answer first
            case do.SlowWorker(worker, factor, for_s):
                workers.slow(worker, factor, for_s)
            case do.KillWorker(worker, KillHow.OOM) if workers.rank(worker) is not None:
                workers.send(worker, messages.OutOfMemoryNow())
            case do.KillWorker(worker, KillHow.EXIT | KillHow.OOM):
                workers.send(worker, messages.ExitNow(1))
            case do.KillWorker(worker, KillHow.HANG):
                workers.send(worker, messages.HangNow())
            case do.KillWorker(worker, how):
                workers.signal(worker, Signals[how.name])
            case do.TerminateWorker(worker, number, grace_s):
                workers.send(worker, messages.Stop())
                workers.terminate(worker, number, grace_s)
            case _:
                raise ProtocolError(f"{type(effect).__name__} is no order for a node")

    def _moved_store(self) -> tuple[str, int] | tuple[()]:
        """Return the store's address, if workers may have an older one."""
        return (self._world.store_host, self._world.store_port) if self._store_moved else ()

    def _begin_generation(self, generation: int) -> None:
        self._begin_timeline(self._world.timeline)
        if generation > 0:
            self.vault.renew()
        if self.copies is not None:
            self.copies.renew(self._world.timeline)
            self.vault.status_page.publish(None, ())  # with several nodes the leader reports what is committed
        self.participant.begin()
        self._output.begin(generation)

    def _begin_timeline(self, timeline: int) -> None:
        self.timeline = timeline
        self._awaited.begin()

    def _seat(self, order: do.AssignRank, capture_interval: int, source: Peer | None) -> None:
        """Assign the rank, once the transcript for a replacement's rehearsal is here."""
        if self.copies is None or not order.replacement:
            self.vault.vacate(order.rank)
            if not order.replacement:
                self.participant.seated(order.rank)
            self._assign(order, capture_interval)
            return

        done = self._fetched(order, source, lambda: self._assign(order, capture_interval))
        resume = self._inventory.resume_of(order.epoch)
        self.copies.seat(order.rank, source, done, resume=resume)

    def _resume(self, order: do.ResumeFrom, source: Peer | None) -> None:
        """Send the order once the snapshot is here."""
        rank = self.workforce.rank(order.worker)
        done = self._fetched(order, source, lambda: self.workforce.send(order.worker, order))
        if self.copies is None or rank is None:
            done(None)
        elif source is None:
            self.copies.compute(rank, order.version, done)
        else:
            self.copies.fetch(rank, order.version, source, done)

    def _fetched(
        self, order: do.AssignRank | do.ResumeFrom, source: Peer | None, then: Callable[[], None]
    ) -> Callable[[str | None], None]:
        """Return the callback of a fetch: it takes the reason of a failure, None if there is none, and then calls `then`."""

        def done(failure: str | None) -> None:
            if failure is None:
                then()
            else:
                node = self.here.node if source is None else source.node
                self._submit(FetchFailed(order.worker, order.epoch, node, failure))

        return done

    def _assign(self, order: do.AssignRank, capture_interval: int) -> None:
        self._output.root_cause.assigned(order.worker, self._output.error_file(order.local_rank))
        self._send_assignment(order, capture_interval, self.vault.descriptors(order.rank))

    def _rehearse(self, order: do.PrepareSpare, capture_interval: int, transcript: int) -> None:
        """Have the spare rehearse with this transcript, and scratch memory."""
        scratch = {
            "status_page": create_status_page(self._spec.settings.world_size),
            **{name: create_memory(f"spare-{name}") for name in ("slot0", "slot1")},
            "transcript": transcript,
        }
        as_replacement = do.AssignRank(
            order.worker, order.rank, order.epoch, replacement=True, local_rank=order.local_rank
        )
        self._send_assignment(as_replacement, capture_interval, scratch, prepare=True)
        for fd in scratch.values():
            os.close(fd)

    def _send_assignment(
        self, order: do.AssignRank, capture_interval: int, memory: Mapping[str, int], *, prepare: bool = False
    ) -> None:
        """Send the worker its rank, with the descriptors of the rank's memory and output."""
        assignment = Assignment(
            order=order,
            world=self._world,
            here=self.here,
            capture_interval=capture_interval,
            error_file=self._output.error_file(order.local_rank),
            resume=-1 if order.replacement else self.participant.resume,
        )
        environment = worker_environment(self._spec, assignment, self._environment)
        streams = self._output.open(order.local_rank, order.rank)
        fds = {**memory, **streams}
        if cpus := self._spec.cpus.get(order.local_rank):
            self.workforce.bind(order.worker, cpus)
        message = messages.Assign(order.rank, order.local_rank, order.epoch, environment, tuple(fds), prepare)
        self.workforce.assign(order.worker, message, fds)
        for fd in streams.values():
            os.close(fd)

    def set_buddies(self, buddies: Buddies) -> None:
        """Set the nodes that get copies, and the ranks to hold copies of."""
        if self.copies is None:
            return
        for rank in self.copies.local_ranks() - buddies.mine.keys():  # also those of replacements that were ended here
            self.copies.left(rank)
        self._buddies = buddies.number
        self.copies.keep(buddies.keep, buddies.groups)
        self.copies.set_buddies(buddies.mine, buddies.groups)
        self.copies.report_all()  # earlier reports were of former buddies, or went to another leader

    def committed(self, committed: Committed) -> None:
        """Tell the node's workers which of their snapshots are needed, and note it for copies here."""
        if committed.timeline == self.timeline:
            newest = Version(committed.version) if committed.version >= 0 else None
            self.vault.status_page.publish(newest, committed.abandoned)
            if self.copies is not None:
                self.copies.committed(newest, committed.abandoned)

    def identify(self, asked: IdentifyCallers) -> None:
        """Report which connections to the job's store were made by processes here that may use it."""
        known, unknown, owners = list[int](), list[int](), SocketOwners()
        for caller in asked.callers:
            uid = owners.uid((caller.address, caller.port), (asked.host, asked.port))
            (known if uid is not None and may_use_store(uid) else unknown).append(caller.number)
        owners.close()
        self._report(CallersIdentified(tuple(known), tuple(unknown)))

    # --- status -------------------------------------------------------------------------------------------------

    def rank_entries(self) -> tuple[tuple[int, ...], ...]:
        """Return the status page's entries of the ranks here: each the rank, then the entry's words."""
        return tuple((rank, *self.vault.status_page.rank_entries[rank].words()) for rank in self.workforce.ranks())

    def traffic(self) -> Traffic | None:
        """Return the traffic of copies between this node and others; None if nothing is copied."""
        return None if self.copies is None else self.copies.traffic()

    def resynced(self) -> NodeResynced:
        """Return the inventory, which a new leader asks for first."""
        return self._inventory.report(self.here.node, () if self.copies is None else self.copies.ranks())

    # --- without a leader -----------------------------------------------------------------------------------------

    def voters_are(self, voters: Sequence[Peer]) -> None:
        """Have the fork server tell these agents when this one and its workers have ended."""
        addresses = [(peer.address, peer.port) for peer in voters]
        self._forkserver.testify(self._spec.credentials(self.here.node), addresses)

    def suspend(self) -> None:
        """Stop every worker."""
        self.suspended = True
        tell("this node has no leader: its workers are stopped until there is one")
        self.workforce.suspend()

    def resume(self) -> None:
        """Let the stopped workers continue."""
        self.suspended = False
        tell("this node has a leader again: its workers continue")
        self.workforce.resume()

    # --- the end ------------------------------------------------------------------------------------------------

    def end_workers(self) -> None:
        """End every worker at once. Their exits are still reaped by the loop."""
        self.workforce.close()
        self.participant.void()

    def close(self) -> None:
        """Free all memory, after the last worker is gone."""
        self._usage.close()
        self._gpus.close()
        if self.copies is not None:
            self.copies.close()
        self.vault.close()

    # --- facts --------------------------------------------------------------------------------------------------

    def replicated(self, rank: Rank, versions: tuple[Version, ...], transcript: bool, timeline: int) -> None:
        """Report what other nodes hold of a rank that lives here."""
        if timeline != self.timeline:
            return
        safe = Safe(timeline, rank, versions, transcript, self._buddies)
        self._report(safe)
        self._awaited.replicated(rank, safe)

    def refused(self, rank: Rank, node: NodeId, has_no_memory: bool) -> None:
        """Report that a node has no memory for copies of a rank that lives here, or has memory again."""
        self._submit(CopyRefused(node, rank) if has_no_memory else RefusedCopyTaken(node, rank))
        self._awaited.limit_wait(rank)

    def _gpu_failed(self, local_rank: int, reason: str) -> None:
        self._submit(DeviceFailed(self.here.node, local_rank, reason))

    def _report(self, report: NodeReport) -> None:
        self.above.report(report)  # to the leader of this moment

    def _captured(self, rank: Rank, version: Version) -> None:
        if self.copies is not None:
            self.copies.captured(rank, version)

    def _submit(self, event: Event) -> None:
        """Submit a fact. The end of a rank's loop waits until its last snapshot is on other nodes."""
        self._inventory.reported(event)
        if isinstance(event, WorkerExited):
            self._output.root_cause.ended(event.worker, event.code, event.signal)
        if self.copies is not None:
            match event:
                case CaptureSkipped():
                    self.copies.skipped()
                case TranscriptCompleted(worker) if (rank := self.workforce.rank(worker)) is not None:
                    self.copies.transcript_completed(rank)
                case LoopFinished(worker, version) if (rank := self.workforce.rank(worker)) is not None:
                    was_skipped = self.vault.status_page.rank_entries[rank].skipped == version  # for lack of memory
                    if not was_skipped and self._awaited.must_wait(rank, event):
                        return
        self._report(Fact(event))
