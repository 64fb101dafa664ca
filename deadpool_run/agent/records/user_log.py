"""The launcher's lines about a run: its start, its protection, decisions, repairs and its end; and what repairs cost.

Without --verbose a repair is one line when the loss is known, and one when it is repaired.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, assert_never

from deadpool_run.agent.console import announcement, report_request, tell
from deadpool_run.agent.records.incident_line import incident_fields, incident_line, short_line, total_s
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.coordinator.address import JOURNAL_NAME
from deadpool_run.core.effects import Announce, Incident, ReportIncident
from deadpool_run.text import counted, span
from deadpool_run.vault.status_page import StatusPage
from deadpool_run.view.job_status import INCIDENTS_SHOWN

_PERCENT = 100.0


@dataclass(slots=True)
class Cost:
    """The cost of losses and planned moves since this agent leads."""

    repairs: int = 0
    moves: int = 0
    steps_repeated: int = 0
    lost_s: float = 0.0
    """From each loss until every rank had completed a step again, and the time of further repeated steps."""

    def add(self, incident: Incident, step_s: float) -> None:
        """Count a repair or a planned move, and its time. `step_s` is the time of a step."""
        self.repairs += not incident.planned
        self.moves += incident.planned
        self.steps_repeated += incident.steps_repeated
        self.lost_s += total_s(incident)
        self.lost_s += max(0, incident.steps_repeated - 1) * step_s

    def goodput(self, up_s: float) -> float:
        """Return the share of the run's time that no repair took."""
        return max(0.0, 1.0 - self.lost_s / up_s) if up_s > 0 else 1.0


def ranks_and_spares(ranks: int, spares: int, spare_nodes: int) -> str:
    """Return the size of a job in words, such as `4 ranks, 1 spare machine`."""
    asked = ((spares, "spare"), (spare_nodes, "spare machine"))
    reserve = [counted(number, name) for number, name in asked if number]
    return ", ".join([counted(ranks, "rank"), *(reserve or ["no spares"])])


class UserLog:
    """The lines of one leader. `was_led`: another agent has led this run before, and has printed the first lines."""

    def __init__(
        self, spec: LaunchSpec, output: Logs, *, was_led: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._spec, self._output = spec, output
        self._clock, self._began_at = clock, clock()
        self.cost = Cost()
        self._ended: deque[tuple[int, str]] = deque(maxlen=INCIDENTS_SHOWN)
        """The epochs of the last repairs, and the times of day at which they ended."""
        self._was_protected = was_led
        if not was_led:
            settings = spec.settings
            tell(
                self._start_line(),
                event="run_started",
                world_size=settings.world_size,
                spares=settings.spares,
                spare_nodes=settings.spare_nodes,
            )

    @property
    def up_s(self) -> float:
        """How long this agent has led the run."""
        return self._clock() - self._began_at

    def summary(self) -> dict[str, float]:
        """Return what repairs have cost, for viewers."""
        return {**asdict(self.cost), "goodput": self.cost.goodput(self.up_s)}

    def seen_by_viewers(self, status: Mapping[str, Any]) -> dict[str, Any]:
        """Return the status object with the cost of repairs, and the time of day at which each of the last ones ended."""
        ended = dict(self._ended)
        incidents = [{**incident, "ended": ended.get(incident["epoch"])} for incident in status["incidents"]]
        return {**status, "incidents": incidents, "cost": self.summary()}

    def report(self, order: Announce | ReportIncident, status_page: StatusPage) -> None:
        """Print a decision or a repair, and count what the repair cost."""
        match order:
            case Announce():
                self._announce(order)
            case ReportIncident(incident):
                self.cost.add(incident, status_page.step_s())
                self._ended.append((incident.epoch, datetime.now(UTC).isoformat(timespec="milliseconds")))
                line = incident_line(incident) if self._spec.verbose else short_line(incident)
                tell(line, event="recovered", incident_id=incident.epoch, **incident_fields(incident))
            case _:
                assert_never(order)

    def _announce(self, order: Announce) -> None:
        """Print a decision, unless it is a detail. Tracebacks that the console has already are left out."""
        if order.detail and not self._spec.verbose:
            return
        if what := self._output.without_shown(order.what):
            tell(announcement(what, order.reason), event="decision", level="error" if order.ours else "info")
        if order.ours:
            tell(report_request(self._spec.run_dir / JOURNAL_NAME), level="error")

    def protected(self, status_page: StatusPage) -> None:
        """Print that the job is protected, the first time."""
        if not self._was_protected:
            self._was_protected = True
            step = status_page.most_completed()
            tell(f"protected since step {step}: a lost rank is replaced in place", event="protected", step=step)

    def ended(self, exit_code: int, status_page: StatusPage, *, managed: bool) -> None:
        """Print how the run ended, and what its losses cost."""
        settings, cost = self._spec.settings, self.cost
        how = "finished" if exit_code == 0 else f"ended with exit code {exit_code}"
        parts = [f"{how} after {span(self.up_s)}"]
        if managed:
            parts.append(counted(status_page.most_completed(), "step"))
        elif settings.spares or settings.spare_nodes:
            parts.append("the script did not call deadpool_run.init(), so its ranks were not protected")
        if cost.repairs or cost.moves:
            goodput = f"goodput {_PERCENT * cost.goodput(self.up_s):.1f} %"
            lost = f"{cost.lost_s:.1f} s lost"
            repeated = f"{counted(cost.steps_repeated, 'step')} repeated"
            kinds = ((cost.repairs, "repair"), (cost.moves, "planned move"))
            parts += [*(counted(number, what) for number, what in kinds if number), repeated, lost, goodput]
        if exit_code and self._output.root is not None:
            parts.append(self._files())
        what = "; ".join((parts[0], ", ".join(parts[1:]))) if parts[1:] else parts[0]
        level = "error" if exit_code else "info"
        tell(f"run {self._spec.run_id} {what}", event="run_ended", level=level, exit_code=exit_code, **self.summary())

    def _start_line(self) -> str:
        spec, settings = self._spec, self._spec.settings
        what = ranks_and_spares(settings.world_size, settings.spares, settings.spare_nodes)
        others = settings.nodes + settings.spare_nodes - 1
        endpoints = () if spec.cluster is None else spec.cluster.endpoints
        at = f" at {', '.join(f'{host}:{port}' for host, port in endpoints)}" if endpoints else ""
        waits = f"; waiting for {counted(others, 'more machine')}{at}" if others else ""
        return f"run {spec.run_id}: {what}{waits}; {self._files()}"

    def _files(self) -> str:
        """Return where the output of workers is, or without any in files, the records of the run."""
        if self._output.root is None:
            return "no log files"
        spec = self._spec
        has_output = spec.log_dir is not None or any((*spec.tee.values(), *spec.redirects.values()))
        return f"logs in {self._output.root}" if has_output else f"records in {spec.run_dir}"
