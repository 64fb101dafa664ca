"""The process of `deadpool-run` itself: wires the parts of one node's launch, and takes them down again.

Decisions are the coordinator's, acts the performer's; here is only who is connected to whom, and in which order things
begin and end. Never imports torch.
"""

import asyncio
import os
import signal
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from deadpool_run.agent import processes
from deadpool_run.agent.environment import base_environment, omp_banner
from deadpool_run.agent.health import Health, sights_of
from deadpool_run.agent.nursery import Nursery
from deadpool_run.agent.nursery_main import MARK
from deadpool_run.agent.output import Output
from deadpool_run.agent.performer import LocalPerformer, tell
from deadpool_run.agent.processes import Process
from deadpool_run.agent.report import status_object
from deadpool_run.agent.run_record import RECORD_NAME, RunRecord
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.agent.store import Store
from deadpool_run.agent.workforce import Workforce
from deadpool_run.coordinator.control import ControlServer
from deadpool_run.coordinator.journal import Journal
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core.events import Event, JobSubmitted, StopRequested
from deadpool_run.errors import UsageError
from deadpool_run.ids import Rank, WorkerId
from deadpool_run.vault.vault import Vault

JOURNAL_NAME = "journal.jsonl"
_OURS = ("deadpool_run.worker.bootstrap", "deadpool_run.worker.store_main", "deadpool_run.worker.job")
"""What every worker needs of this package; named, not imported: it imports torch."""
_END_TIMEOUT_S = 10.0
"""At the end: how long killed processes may take to be gone, before they are left to the kernel."""
_EXIT_LAUNCH_FAILED = 1


def run(spec: LaunchSpec) -> int:
    """Run the job to its end and return the exit code. Raises `UsageError` if its directories cannot be used."""
    _make_run_dir(spec)
    processes.become_subreaper()
    return asyncio.run(_Agent(spec).main())


def _make_run_dir(spec: LaunchSpec) -> None:
    try:
        spec.run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        spec.run_dir.chmod(0o700)
    except OSError as error:
        raise UsageError(f"run directory {spec.run_dir}: {error.strerror}\nchoose another with --run-dir") from error
    if (spec.run_dir / RECORD_NAME).exists():
        raise UsageError(f"{spec.run_dir} holds another run\ngive this one a directory of its own with --run-dir")


class _Agent:
    """One launch. Everything is made in `main`, in the running loop, and unmade there in reverse."""

    def __init__(self, spec: LaunchSpec) -> None:
        self._spec = spec

    async def main(self) -> int:
        spec = self._spec
        loop = asyncio.get_running_loop()
        self._over: asyncio.Future[tuple[int, str]] = loop.create_future()
        loop.set_exception_handler(self._on_bug)
        self._output = Output(spec)
        mark = {MARK: uuid.uuid4().hex}
        self._nursery = Nursery(self._preload(), base_environment(spec, os.environ) | mark, self._on_lost)
        self._store = Store(self._nursery, self._on_lost)
        self._vault = Vault(spec.settings.world_size)
        self._workforce = Workforce(self._nursery, self.submit, self._vault.captured)
        self._performer = LocalPerformer(
            spec=spec,
            mark=mark,
            workforce=self._workforce,
            vault=self._vault,
            store=self._store,
            output=self._output,
            on_stop=self._on_stop,
        )
        self._control = ControlServer(spec.run_dir, spec.settings.world_size, self)
        self._journal = Journal(spec.run_dir / JOURNAL_NAME, spec.settings)
        self._server = CoordinatorServer(spec.settings, self._performer, self._journal, self._control.notify)
        self._health = Health(
            spec.hang_timeout_s,
            look=lambda: sights_of(self._server.state, self._vault.board),
            pid=self._workforce.pid,
            submit=self.submit,
            say=tell,
        )
        self._record = RunRecord(spec, None if self._output.root is None else str(self._output.root))
        for number in spec.signals_to_handle:
            loop.add_signal_handler(number, self.submit, StopRequested(number))
        if signal.SIGUSR1 not in spec.signals_to_handle:
            loop.add_signal_handler(signal.SIGUSR1, self._on_end_foretold)
        loop.add_signal_handler(signal.SIGCHLD, self._reap_strangers)
        exit_code, reason = _EXIT_LAUNCH_FAILED, "deadpool-run itself failed"
        try:
            await self._control.start()
            if banner := omp_banner(spec, os.environ):
                tell(banner)
            self.submit(JobSubmitted())
            exit_code, reason = await self._over
        finally:
            await self._end()
            self._record.end(exit_code, reason)
        return exit_code

    # --- what the parts ask of the whole ------------------------------------------------------------------------

    def submit(self, event: Event) -> None:
        """Tell the coordinator a fact, unless the job is over."""
        if not self._over.done():
            self._server.submit(event)

    def status(self) -> Mapping[str, Any]:
        """Return what viewers see."""
        return status_object(self._server.state, self._vault.board, self._record.parts)

    def holder(self, rank: Rank) -> tuple[WorkerId, int] | None:
        """Return who holds the rank, with its pid."""
        worker = self._performer.ranks.get(rank)
        pid = None if worker is None else self._workforce.pid(worker)
        return None if worker is None or pid is None else (worker, pid)

    def _on_end_foretold(self) -> None:
        """Go on: somebody says that the job is about to be ended, and there is nowhere yet to save it to.

        It is Slurm's `--signal=USR1@SECONDS`. Where there is a durable checkpoint to write, this is the place to ask the
        coordinator for it, and then for the end with exit code 75 (queue me again).
        """
        tell("SIGUSR1: the job is about to be ended; there is nowhere to save it to, so training goes on until then")

    def _on_stop(self, exit_code: int, reason: str) -> None:
        if not self._over.done():
            self._over.set_result((exit_code, reason))

    def _on_lost(self, reason: str) -> None:
        """End the job: without a nursery or a store none can be run."""
        tell(reason)
        self._on_stop(_EXIT_LAUNCH_FAILED, reason)

    def _on_bug(self, _: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        """Turn an error in a callback into the end of the job: nothing can be relied on after it."""
        error = context.get("exception") or RuntimeError(context["message"])
        if not self._over.done():
            self._over.set_exception(error)

    # --- beginning and end --------------------------------------------------------------------------------------

    def _preload(self) -> tuple[str, ...]:
        return (*self._spec.preload, *_OURS) if self._spec.warm else ()

    def _ours(self) -> Iterator[Process]:
        yield from self._workforce.processes()
        if self._store.process is not None:
            yield self._store.process
        yield self._nursery.process

    def _reap_strangers(self) -> None:
        """Reap what was adopted from workers; not while a process of ours may not be known to be ours."""
        if not self._nursery.busy:
            known = {process.pid: process for process in self._ours()}
            processes.reap_strangers(known.get)

    async def _end(self) -> None:
        """End what is left, however the job ended; nothing outlives this."""
        self._health.close()
        self._server.close()
        await self._control.close()
        self._workforce.close()
        self._store.close()
        self._nursery.close()
        await processes.wait_gone([process for process in self._ours() if process.alive], _END_TIMEOUT_S)
        processes.kill_strangers(_END_TIMEOUT_S)
        self._output.close()
        self._vault.close()
        self._journal.close()
