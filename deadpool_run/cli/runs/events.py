"""The journal of a run as lines for people. Pure, except for finding its files."""

from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from deadpool_run.agent.records.incident_line import short_line
from deadpool_run.coordinator.address import JOURNALS
from deadpool_run.core.effects import Incident
from deadpool_run.core.recovery.shutdown import describe_exit
from deadpool_run.errors import ProtocolError
from deadpool_run.text import printable
from deadpool_run.wire.typed import from_plain, parse

_EVENTS: Mapping[str, str] = {
    "JobSubmitted": "the job begins on node {node}",
    "NodeJoined": "node {node} joined",
    "NodeLost": "node {node} was lost: {reason}",
    "CoordinatorMoved": "node {node} leads now, in term {term}",
    "SnapshotCommitted": "version {version} is safe on several nodes",
    "FetchFailed": "worker {worker} could not fetch its state from node {source}: {message}",
    "WorkerStarted": "worker {worker} started (pid {pid})",
    "PrepareFailed": "spare worker {worker} could not rehearse: {message}",
    "WorkerStartFailed": "worker {worker} could not be started: {reason}",
    "SetupCompleted": "worker {worker} entered its step loop",
    "WorkerRaised": "worker {worker} raised {kind}: {message}",
    "JobRefused": "worker {worker} refused to continue: {message}",
    "LoopBypassed": "worker {worker} updates weights outside the step loop",
    "DrainFailed": "worker {worker} could not drain its step: {message}",
    "AttachFailed": "worker {worker} could not connect: {message}",
    "CollectiveFailed": "a collective of worker {worker} failed: {message}",
    "LoopFinished": "worker {worker} completed its last step, {version}",
    "WorkerHung": "worker {worker} hangs: {reason}",
    "KillRequested": "a user kills rank {rank} ({how})",
    "SlowRequested": "a user slows rank {rank} {factor} times for {for_s} s",
    "AgentKillRequested": "a user kills the agent of node {node}",
}
"""Texts of events. Other events are not shown."""
_EFFECTS: Mapping[str, str] = {
    "AssignRank": "worker {worker} takes rank {rank} in epoch {epoch}",
    "ReEnter": "worker {worker} runs its script again",
    "ResumeFrom": "worker {worker} resumes from version {version}",
    "SetCaptureInterval": "worker {worker} takes a snapshot every {interval} steps",
    "StopJob": "the job ended with exit code {exit_code}: {reason}",
}


def journals_of(run_dir: Path) -> list[Path]:
    """Return the journals of a run that are on this machine, those of all leaders, the oldest first."""
    found = {*run_dir.glob(JOURNALS), *run_dir.glob(f"node-*/{JOURNALS}")}
    return sorted(found, key=lambda path: path.stat().st_ctime)


def entries(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the entries of a journal: its lines without the first. A line that cannot be read is left out."""
    for line in lines:
        try:
            found = parse(line)
        except ProtocolError:
            continue  # the last one, cut by a kill
        if isinstance(found, dict) and ("event" in found or "dropped" in found):
            yield found


def timed(
    found: Iterable[dict[str, Any]], started: datetime | None
) -> Iterator[tuple[datetime | None, dict[str, Any]]]:
    """Yield each entry with its time of day. The journal has a clock of its own, whose first time is that of the start."""
    first: float | None = None
    at: datetime | None = None
    for entry in found:
        now = entry.get("now")
        if isinstance(now, int | float) and started is not None:
            first = float(now) if first is None else first
            at = started + timedelta(seconds=now - first)
        yield at, entry


def texts(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for an entry: its event, then the decisions."""
    if "dropped" in entry:
        yield f"({entry['dropped']} entries are missing: the disk had stalled)"
        return
    event = entry.get("event") or {}
    if event.get("type") == "WorkerExited":
        yield f"worker {event.get('worker')} {describe_exit(event.get('code'), event.get('signal'))}"
    elif event.get("type") == "NodesLost":
        yield from (_filled(_EVENTS["NodeLost"], each) for each in event.get("losses", ()))
    elif event.get("type") in _EVENTS:
        yield _filled(_EVENTS[event["type"]], event)
    for effect in entry.get("effects") or ():
        yield from _effect_texts(effect)


def _effect_texts(effect: Mapping[str, Any]) -> Iterator[str]:
    match effect.get("type"):
        case "Announce":
            what, reason = effect.get("what", ""), effect.get("reason", "")
            yield printable(reason if "--- rank" in what else f"{what}: {reason}" if reason else what)
        case "ReportIncident":
            try:
                yield short_line(from_plain(Incident, effect.get("incident")))
            except ProtocolError:
                yield "a repair ended; another version of deadpool-run wrote its details"
        case "AssignRank" if effect.get("replacement"):
            return  # the decision to replace says so
        case "BeginGeneration" if effect.get("generation"):
            yield f"the world starts again (generation {effect['generation']})"
        case str(kind) if kind in _EFFECTS:
            yield _filled(_EFFECTS[kind], effect)


def _filled(text: str, values: Mapping[str, Any]) -> str:
    return printable(text.format_map(_Known(values)))


class _Known(dict[str, Any]):
    """Values by name; a missing one is shown as a question mark."""

    def __missing__(self, key: str) -> str:
        return "?"
