"""Metrics of a run, with the names and units that Prometheus expects. Pure.

Ranks have series of their own in jobs of up to `RANKS_SHOWN` ranks. Thousands of series would overload a small server.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    StateSetMetricFamily,
)

from deadpool_run.agent.records.incident_line import total_s
from deadpool_run.core.effects import Incident
from deadpool_run.core.transitions import JobPhase
from deadpool_run.text import moment
from deadpool_run.vault.status_page import StatusPage
from deadpool_run.view.health import Status, ready_spares, spares_asked

RANKS_SHOWN = 256
BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_PER_S = 1e3


class RepairTimes:
    """A cumulative histogram of the durations of repairs."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS_S) + 1)
        self._sum_s = 0.0

    def add(self, incident: Incident) -> None:
        """Count a repair. A planned move is none."""
        if incident.planned:
            return
        seconds = total_s(incident)
        self._sum_s += seconds
        for place, limit in enumerate((*BUCKETS_S, float("inf"))):
            self._counts[place] += seconds <= limit

    def family(self) -> Metric:
        """Return the histogram."""
        limits = (*map(str, BUCKETS_S), "+Inf")
        family = HistogramMetricFamily(
            "deadpool_repair_duration_seconds", "Time from a loss to the first step of all ranks."
        )
        family.add_metric(
            [], [(limit, float(count)) for limit, count in zip(limits, self._counts, strict=True)], self._sum_s
        )
        return family


def families(status: Status, status_page: StatusPage, repairs: RepairTimes, version: str) -> Iterator[Metric]:
    """Yield all metrics with their present values."""
    run, cost, ranks = status["run"], status["cost"], status["ranks"]
    info = {"run_id": str(run.get("run_id")), "version": version}
    yield InfoMetricFamily("deadpool_run", "The run.", info)
    phase = str(status["phase"])
    states = {each.value: each.value == phase for each in JobPhase}
    yield StateSetMetricFamily("deadpool_job_phase", "Phase of the job, 1 for the present one.", states)
    yield _gauge(
        "deadpool_start_time_seconds", "Start of the run, seconds since the epoch.", _timestamp(run.get("started"))
    )
    yield _gauge("deadpool_ranks", "Ranks of the job.", len(ranks))
    yield _gauge("deadpool_ranks_running", "Ranks that train.", sum(rank["phase"] == "running" for rank in ranks))
    yield _gauge("deadpool_spares_requested", "Requested spare processes.", spares_asked(status))
    yield _gauge("deadpool_spares_ready", "Spare processes that can take a rank at once.", len(ready_spares(status)))
    yield _gauge("deadpool_completed_steps", "Completed steps of the rank with the most.", status_page.most_completed())
    yield _gauge("deadpool_planned_steps", "Steps of the training loop; 0: not known.", status["total_steps"] or 0)
    yield _gauge("deadpool_step_duration_seconds", "Last step of the slowest rank.", status_page.step_s())
    yield _counter("deadpool_repairs", "Losses that were repaired in place.", cost["repairs"])
    yield _counter("deadpool_moves", "Planned moves of ranks, by drain.", cost["moves"])
    yield _counter("deadpool_repeated_steps", "Steps that ran again after a loss.", cost["steps_repeated"])
    yield _counter("deadpool_lost_seconds", "Time that repairs and planned moves took.", cost["lost_s"])
    yield _counter("deadpool_world_restarts", "Restarts of the world.", status["generation"])
    yield _gauge("deadpool_goodput_ratio", "Share of the time that no repair or planned move took.", cost["goodput"])
    yield repairs.family()
    if status["committed"] is not None:
        yield _gauge("deadpool_snapshot_step", "Newest version that every rank has a snapshot of.", status["committed"])
    yield _gauge("deadpool_snapshot_interval_steps", "Steps between two snapshots.", status["capture_interval"])
    yield _gauge("deadpool_snapshot_memory_bytes", "Snapshots and copies on this machine.", status_page.taken)
    capture_s = max((rank["capture_ms"] for rank in ranks), default=0.0) / _PER_S
    yield _gauge("deadpool_snapshot_duration_seconds", "Last copy of the slowest rank into a snapshot.", capture_s)
    exposed_ms = status.get("exposed_ms")
    yield _gauge(
        "deadpool_exposed_seconds", "For how long copies on other machines are missing.", (exposed_ms or 0.0) / _PER_S
    )
    yield from _durable(status.get("durable") or {})
    if len(ranks) <= RANKS_SHOWN:
        yield from _of_ranks(ranks)


def _durable(durable: Any) -> Iterator[Metric]:
    if durable.get("version") is not None:
        yield _gauge("deadpool_checkpoint_step", "Version of the newest durable checkpoint.", durable["version"])
        written = _timestamp(durable.get("written"))
        yield _gauge("deadpool_checkpoint_timestamp_seconds", "When it was written, seconds since the epoch.", written)


def _of_ranks(ranks: Any) -> Iterator[Metric]:
    labels = ["rank", "node"]
    steps = GaugeMetricFamily("deadpool_rank_completed_steps", "Steps that the rank has completed.", labels=labels)
    times = GaugeMetricFamily("deadpool_rank_step_duration_seconds", "Last step of the rank.", labels=labels)
    for rank in ranks:
        values = [str(rank["rank"]), str(rank["node"] or "")]
        steps.add_metric(values, rank["step"])
        times.add_metric(values, rank["step_ms"] / _PER_S)
    yield steps
    yield times


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    """Return a counter, whose name gets the ending `_total`."""
    return CounterMetricFamily(name, text, value=value)


def _timestamp(text: object) -> float:
    found = moment(text)
    return 0.0 if found is None else found.timestamp()
