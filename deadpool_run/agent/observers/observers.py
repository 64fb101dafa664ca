"""The observers of one leader: log lines, costs and samples always; metrics, a chaos run and a command if options ask for them."""

import asyncio
import os
from collections.abc import Mapping
from typing import Any, Protocol

from deadpool_run.agent.chaos.runner import Chaos, verdict_line
from deadpool_run.agent.console import tell
from deadpool_run.agent.node.node import LocalNode
from deadpool_run.agent.observers.repair_command import RepairCommand, incident_environment
from deadpool_run.agent.observers.samples import Samples
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.records.user_log import UserLog
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.coordinator.requests import RequestHandler
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core.effects import Announce, Incident, ReportIncident
from deadpool_run.vault.status_page import StatusPage


class ObservedJob(Protocol):
    """The parts of a leader that observers use."""

    node: LocalNode
    request_handler: RequestHandler
    server: CoordinatorServer


class Metrics(Protocol):
    """A server of metrics."""

    def repaired(self, incident: Incident) -> None:
        """Count a repair."""

    def close(self) -> None:
        """Stop serving."""


class Observers:
    """The observers of one leader, in the running loop."""

    def __init__(self, spec: LaunchSpec, output: Logs, job: ObservedJob, parent: ForkServer, *, was_led: bool) -> None:
        """`was_led`: another agent has led this run before."""
        self._spec, self._job = spec, job
        self._log = UserLog(spec, output, was_led=was_led, clock=asyncio.get_running_loop().time)
        self._samples: Samples | None = None
        self._chaos: Chaos | None = None
        self._metrics: Metrics | None = None
        self._command = RepairCommand(spec.on_repair, parent, os.environ) if spec.on_repair else None

    def begin(self) -> None:
        """Start the samples, the metrics server and the chaos run."""
        self._samples = Samples(self._spec.run_dir, self._page, self._job.server.now)
        if self._spec.metrics is not None:
            from deadpool_run.agent.observers.metrics_server import MetricsServer  # noqa: PLC0415 - needs an extra

            self._metrics = MetricsServer(self._spec.metrics, self._job.request_handler.answer, self._page)
        if self._spec.chaos is not None:
            self._chaos = Chaos(self._spec.chaos, self._job.request_handler.answer)

    def report(self, order: Announce | ReportIncident) -> None:
        """Print a decision or a repair."""
        self._log.report(order, self._page())
        if isinstance(order, ReportIncident):
            self._repaired(order.incident)

    def _repaired(self, incident: Incident) -> None:
        if self._samples is not None:
            self._samples.take()
        for observer in (self._chaos, self._metrics):
            if observer is not None:
                observer.repaired(incident)
        if self._command is not None:
            self._command.run(incident_environment(incident, self._spec.run_id, self._spec.run_dir))

    def protected(self) -> None:
        """Print once that the job is protected."""
        self._log.protected(self._page())

    def seen_by_viewers(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Return the status object with what is known of repairs here."""
        return self._log.seen_by_viewers(status)

    def ended(self, exit_code: int, reason: str) -> None:
        """Print how the run ended."""
        state = self._job.server.state
        self._log.ended(exit_code, self._page(), managed=state.managed)
        if self._chaos is not None:
            verdict, cost = self._chaos.verdict(exit_code, state.generation), self._log.summary()
            line, level = verdict_line(verdict, cost, reason), "info" if verdict["survived"] else "error"
            tell(line, event="chaos_verdict", level=level, **verdict, **cost)

    def _page(self) -> StatusPage:
        return self._job.node.vault.status_page

    def close(self, *, wait: bool) -> None:
        """Stop all observers. `wait`: wait a moment for the disk, because the process ends."""
        if self._chaos is not None:
            self._chaos.stop()
        for closing in (self._metrics, self._command):
            if closing is not None:
                closing.close()
        if self._samples is not None:
            self._samples.close(wait=wait)
