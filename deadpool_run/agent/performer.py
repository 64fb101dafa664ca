"""Turns the coordinator's orders into acts on this node's workers. Decides nothing."""

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from typing import assert_never

from deadpool_run.agent.environment import Seat, worker_environment
from deadpool_run.agent.incident_line import incident_line
from deadpool_run.agent.output import Output
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.agent.store import HOST, Store
from deadpool_run.agent.workforce import Workforce
from deadpool_run.core import effects as do
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import KillHow
from deadpool_run.ids import Rank, WorkerId
from deadpool_run.vault.vault import Vault
from deadpool_run.wire import messages

_SIGNALS = {KillHow.SIGKILL: signal.SIGKILL, KillHow.SIGTERM: signal.SIGTERM, KillHow.SIGSEGV: signal.SIGSEGV}
_INJECTED_EXIT_CODE = 1
_STDERR = 2


def tell(text: str) -> None:
    """Say something to the user: on stderr, never among the workers' standard output. A job never ends for it."""
    with contextlib.suppress(OSError):  # the terminal is gone, or takes nothing now
        os.write(_STDERR, f"deadpool-run: {text}\n".encode(errors="replace"))


class LocalPerformer:
    """Performs on this node.

    `mark` is what every worker's environment has so that its family can be found. `on_stop` takes the exit code and the
    reason when the job is over.
    """

    def __init__(  # noqa: PLR0913 - the parts of a node that it acts on
        self,
        *,
        spec: LaunchSpec,
        mark: dict[str, str],
        workforce: Workforce,
        vault: Vault,
        store: Store,
        output: Output,
        on_stop: Callable[[int, str], None],
    ) -> None:
        self._spec = spec
        self._mark = mark
        self._workforce = workforce
        self._vault = vault
        self._store = store
        self._output = output
        self._on_stop = on_stop
        self._outer: Mapping[str, str] = dict(os.environ)
        self._generation = -1
        self._capture_interval = spec.settings.capture_interval
        self.ranks: dict[Rank, WorkerId] = {}

    def perform(self, effect: Effect) -> None:  # noqa: C901, PLR0912 - one case for each order
        """Carry out one order."""
        match effect:
            case do.BeginGeneration(generation):
                self._begin(generation)
            case do.SetBuddies() | do.ReportReplicas() | do.DiscardAbove():
                pass  # one node has no buddies
            case do.StartWorker(worker):
                self._workforce.start(worker)
            case do.AssignRank():
                self._store.when_fresh(lambda: self._assign(effect))
            case do.AbortStep(worker, epoch):
                self._workforce.send(worker, messages.Abort(epoch))
            case do.ResumeFrom(worker, epoch, version):
                self._workforce.send(worker, messages.Resume(epoch, version))
            case do.AttachGroups(worker, epoch):
                self._workforce.send(worker, messages.Attach(epoch))
            case do.SetCaptureInterval(worker, interval):
                self._capture_interval = interval  # also of those who are given a rank from now on
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
            case do.ReportIncident(incident):
                tell(incident_line(incident))
            case do.Announce(what, reason):
                tell(f"{what}: {reason}" if reason else what)
            case do.StopJob(exit_code, reason):
                self._on_stop(exit_code, reason)
            case _:
                assert_never(effect)

    def _begin(self, generation: int) -> None:
        if generation > 0:
            self._vault.renew()
            self._store.renew()
        self._generation = generation
        self._capture_interval = self._spec.settings.capture_interval
        self.ranks.clear()
        self._output.begin(generation)

    def _assign(self, order: do.AssignRank) -> None:
        local_rank = order.local_rank
        self._vault.vacate(order.rank)
        self.ranks[order.rank] = order.worker
        seat = Seat(
            worker=order.worker,
            rank=order.rank,
            local_rank=local_rank,
            epoch=order.epoch,
            generation=self._generation,
            newcomer=order.newcomer,
            capture_interval=self._capture_interval,
            store_host=HOST,
            store_port=self._store.port,
            error_file=self._output.error_file(local_rank),
        )
        streams = self._output.open(local_rank)
        fds = {**self._vault.descriptors(order.rank), **streams}
        assign = messages.Assign(
            rank=order.rank,
            local_rank=local_rank,
            world_size=self._spec.settings.world_size,
            epoch=order.epoch,
            newcomer=order.newcomer,
            store_host=HOST,
            store_port=self._store.port,
            capture_interval=self._capture_interval,
            env=worker_environment(self._spec, seat, self._outer) | self._mark,
            fds=list(fds),
        )
        self._workforce.assign(order.worker, assign, fds)
        for fd in streams.values():
            os.close(fd)

    def _kill(self, worker: WorkerId, how: KillHow) -> None:
        if how is KillHow.EXIT:
            self._workforce.send(worker, messages.ExitNow(_INJECTED_EXIT_CODE))
        else:
            self._workforce.signal(worker, _SIGNALS[how])
