"""The history as trace events (Chrome's JSON format), which Perfetto and chrome://tracing show. Pure.

Source: Trace Event Format, Google, 2016. Each rank is a process with a track of its workers; repairs and counters have one of their own.
"""

from collections.abc import Iterator
from typing import Any

from deadpool_run.cli.report.history import History

_PER_US = 1e6
_JOB = 0
"""The process of the job as a whole; rank 0 is process 1."""


def trace(history: History) -> dict[str, Any]:
    """Return the trace, ready for JSON."""
    record = history.record
    other = {"run_id": record.get("run_id"), "started": record.get("started")}
    return {"traceEvents": list(_events(history)), "displayTimeUnit": "ms", "otherData": other}


def _events(history: History) -> Iterator[dict[str, Any]]:
    yield _named(_JOB, "process_name", "job")
    yield {"ph": "M", "pid": _JOB, "tid": 0, "name": "process_sort_index", "args": {"sort_index": -1}}
    for rank in range(history.world_size):
        yield _named(rank + 1, "process_name", f"rank {rank}")
    for tenure in history.tenures:
        ended = history.duration if tenure.ended is None else tenure.ended
        args = {"pid": tenure.pid, "node": tenure.node, "end": tenure.end}
        yield _span(tenure.rank + 1, f"worker {tenure.worker}", tenure.began, ended, args)
        if tenure.set_up is not None and tenure.set_up > tenure.began:
            yield _span(tenure.rank + 1, "set-up", tenure.began, tenure.set_up, {})
    for repair in history.repairs:
        incident = repair.incident
        lost = ", ".join(str(loss.rank) for loss in incident.losses)
        causes = "; ".join(loss.cause for loss in incident.losses)
        args = {"causes": causes, "resumed": incident.resumed, "steps_repeated": incident.steps_repeated}
        began = repair.began - (incident.detected_s or 0.0)
        yield _span(_JOB, f"{'move' if repair.planned else 'repair'} of rank {lost}", began, repair.ended, args)
        at = began
        for name, seconds in repair.parts():
            yield _span(_JOB, name, at, at + seconds, {})
            at += seconds
    for moment in history.moments:
        pid = _JOB if moment.rank is None else moment.rank + 1
        yield {
            "ph": "i",
            "s": "g",
            "pid": pid,
            "tid": 0,
            "ts": moment.at * _PER_US,
            "name": moment.text,
            "cat": moment.kind,
        }
    for sample in history.samples:
        for name, value in (
            ("completed steps", sample.step),
            ("step ms", sample.step_s * 1e3),
            ("capture ms", sample.capture_s * 1e3),
            ("snapshot bytes", sample.bytes),
        ):
            yield {"ph": "C", "pid": _JOB, "tid": 0, "ts": sample.now * _PER_US, "name": name, "args": {"value": value}}


def _named(pid: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": 0, "name": what, "args": {"name": name}}


def _span(pid: int, name: str, began: float, ended: float, args: dict[str, Any]) -> dict[str, Any]:
    length = max(0.0, ended - began)
    return {"ph": "X", "pid": pid, "tid": 0, "ts": began * _PER_US, "dur": length * _PER_US, "name": name, "args": args}
