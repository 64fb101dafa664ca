"""Carries out the coordinator's orders on this node's workers. Decides nothing."""

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from deadpool_run.agent.checkpoint.participant import CheckpointParticipant
from deadpool_run.agent.environment import WorkerPlace, worker_environment
from deadpool_run.agent.node.copies import Copies
from deadpool_run.agent.processes.workers import Workforce
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.core import effects as do
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import FetchFailed
from deadpool_run.core.injection import KillHow
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Epoch, NodeId, WorkerId
from deadpool_run.vault.segments import create_memory
from deadpool_run.vault.status_page import create_status_page
from deadpool_run.vault.vault import Vault
from deadpool_run.wire import messages
from deadpool_run.wire.peers import Peer, World

_SIGNALS = {KillHow.SIGKILL: signal.SIGKILL, KillHow.SIGTERM: signal.SIGTERM, KillHow.SIGSEGV: signal.SIGSEGV}
_INJECTED_EXIT_CODE = 1


@dataclass(frozen=True, slots=True)
class Situation:
    """This node's place in the job."""

    node: NodeId
    address: str
    """Where others reach this node's workers: an IP literal."""
    replicates: bool
    """Snapshots are copied to other nodes, so workers report each one."""


class OrderPerformer:
    """Carries out orders on this node.

    `mark` is in every worker's environment, so that its descendants can be found. `copies` returns the replication
    between nodes; None where there is none. `fetch_failed` takes what could not be fetched.
    """

    def __init__(  # noqa: PLR0913 - the parts of a node that it acts on
        self,
        *,
        spec: LaunchSpec,
        situation: Situation,
        mark: dict[str, str],
        workforce: Workforce,
        vault: Vault,
        participant: CheckpointParticipant,
        output: Logs,
        copies: Callable[[], Copies | None],
        fetch_failed: Callable[[FetchFailed], None],
    ) -> None:
        self._spec = spec
        self._situation = situation
        self._mark = mark
        self._workforce = workforce
        self._vault = vault
        self._participant = participant
        self._output = output
        self._copies = copies
        self._fetch_failed = fetch_failed
        self._outer: Mapping[str, str] = dict(os.environ)
        self._world = World(-1, 0, "", 0)
        self._store_moved = False

    def set_world(self, world: World) -> None:
        """Set the world that assignments refer to from now on."""
        before, self._world = self._world, world
        if before.store_host and (before.store_host, before.store_port) != (world.store_host, world.store_port):
            self._store_moved = True

    def perform(self, effect: Effect, capture_interval: int, source: Peer | None) -> None:  # noqa: C901, PLR0912 - one case for each order
        """Carry out one order for this node. The leader's own orders never come here."""
        match effect:
            case do.BeginGeneration(generation):
                self._begin(generation)
            case do.StartWorker(worker):
                self._workforce.start(worker)
            case do.AssignRank(worker):
                self._workforce.expect_rank(worker)
                self._seat(effect, capture_interval, source)
            case do.PrepareSpare():
                self._prepare(effect, capture_interval)
            case do.AbortStep(worker, epoch):
                self._workforce.send(worker, messages.Abort(epoch))
            case do.ReEnter(worker, epoch):
                self._workforce.send(worker, messages.RunAgain(epoch, *self._moved_store()))
            case do.ResumeFrom():
                self._resume(effect, source)
            case do.AttachGroups(worker, epoch):
                self._workforce.send(worker, messages.Attach(epoch, *self._moved_store()))
            case do.SetCaptureInterval(worker, interval):
                self._workforce.send(worker, messages.SetInterval(interval))
            case do.ReleaseWorker(worker):
                self._workforce.send(worker, messages.Release())
            case do.DismissWorker(worker):
                self._workforce.dismiss(worker, self._spec.shutdown_timeout_s)
            case do.KillWorker(worker, how):
                self._kill(worker, how)
            case do.TerminateWorker(worker, number, grace_s):
                self._workforce.send(worker, messages.Stop())
                self._workforce.terminate(worker, number, grace_s)
            case _:
                raise ProtocolError(f"{type(effect).__name__} is no order for a node")

    def _moved_store(self) -> tuple[str, int] | tuple[()]:
        """Return the store's address, if workers may have an older one."""
        return (self._world.store_host, self._world.store_port) if self._store_moved else ()

    def _begin(self, generation: int) -> None:
        if generation > 0:
            self._vault.renew()
        copies = self._copies()
        if copies is not None:
            copies.renew(self._world.timeline)
        self._participant.begin()
        self._output.begin(generation)

    def _seat(self, order: do.AssignRank, capture_interval: int, source: Peer | None) -> None:
        """Assign the rank once the transcript for its replacement's rehearsal is here."""
        copies = self._copies()
        if copies is None or not order.replacement:
            self._vault.vacate(order.rank)
            if not order.replacement:
                self._participant.seated(order.rank)
            self._assign(order, capture_interval)
            return

        def done(failure: str | None) -> None:
            if failure is None:
                self._assign(order, capture_interval)
            else:
                self._fail(order.worker, order.epoch, source, failure)

        copies.seat(order.rank, source, done)

    def _resume(self, order: do.ResumeFrom, source: Peer | None) -> None:
        rank = self._workforce.rank(order.worker)

        def done(failure: str | None) -> None:
            if failure is None:
                self._workforce.send(order.worker, messages.Resume(order.epoch, order.version))
            else:
                self._fail(order.worker, order.epoch, source, failure)

        copies = self._copies()
        if source is None or copies is None or rank is None:
            done(None)
        else:
            copies.fetch(rank, order.version, source, done)

    def _fail(self, worker: WorkerId, epoch: Epoch, source: Peer | None, failure: str) -> None:
        node = self._situation.node if source is None else source.node
        self._fetch_failed(FetchFailed(worker, epoch, node, failure))

    def _assign(self, order: do.AssignRank, capture_interval: int) -> None:
        self._output.root_cause.assigned(order.worker, self._output.error_file(order.local_rank))
        fds = self._vault.descriptors(order.rank)
        assign, fds, streams = self._order(order, capture_interval, fds)
        self._workforce.assign(order.worker, assign, fds)
        for fd in streams:
            os.close(fd)

    def _prepare(self, order: do.PrepareSpare, capture_interval: int) -> None:
        """Have the spare rehearse with the rank's transcript and scratch memory."""
        transcript = self._vault.open_transcript(order.rank)
        if transcript is None:
            return  # the rank has moved: the rehearsal is not needed
        scratch = {
            "status_page": create_status_page(self._spec.settings.world_size),
            **{name: create_memory(f"spare-{name}") for name in ("slot0", "slot1")},
            "transcript": transcript,
        }
        as_replacement = do.AssignRank(
            order.worker, order.rank, order.epoch, replacement=True, local_rank=order.local_rank
        )
        assign, fds, streams = self._order(as_replacement, capture_interval, scratch)
        self._workforce.prepare(order.worker, replace(assign, prepare=True), fds)
        for fd in (*streams, *scratch.values()):
            os.close(fd)

    def _order(
        self, order: do.AssignRank, capture_interval: int, memory: Mapping[str, int]
    ) -> tuple[messages.Assign, dict[str, int], list[int]]:
        """Return the message for the worker, its descriptors by name, and those of them that the caller closes."""
        local_rank = order.local_rank
        resume = -1 if order.replacement else self._participant.resume
        seat = WorkerPlace(
            worker=order.worker,
            rank=order.rank,
            local_rank=local_rank,
            epoch=order.epoch,
            generation=self._world.generation,
            replacement=order.replacement,
            capture_interval=capture_interval,
            store_host=self._world.store_host,
            store_port=self._world.store_port,
            error_file=self._output.error_file(local_rank),
            node=self._situation.node,
            address=self._situation.address,
            replicates=self._situation.replicates,
            resume=resume,
        )
        streams = self._output.open(local_rank, order.rank)
        fds = {**memory, **streams}
        assign = messages.Assign(
            rank=order.rank,
            local_rank=local_rank,
            world_size=self._spec.settings.world_size,
            epoch=order.epoch,
            replacement=order.replacement,
            store_host=self._world.store_host,
            store_port=self._world.store_port,
            capture_interval=capture_interval,
            env=worker_environment(self._spec, seat, self._outer) | self._mark,
            fds=tuple(fds),
            resume=resume,
        )
        if cpus := self._spec.cpus.get(local_rank):
            self._workforce.bind(order.worker, cpus)
        return assign, fds, list(streams.values())

    def _kill(self, worker: WorkerId, how: KillHow) -> None:
        if how is KillHow.EXIT:
            self._workforce.send(worker, messages.ExitNow(_INJECTED_EXIT_CODE))
        else:
            self._workforce.signal(worker, _SIGNALS[how])
