"""The journal of a run as lines for people. Pure, except for finding its files."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from deadpool_run.agent.records.incident_line import short_line
from deadpool_run.coordinator.address import JOURNALS
from deadpool_run.core.effects import Incident
from deadpool_run.core.recovery.shutdown import describe_exit
from deadpool_run.errors import NoSuchRunError, ProtocolError
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
    "AbortFailed": "worker {worker} could not abort its step: {message}",
    "AttachFailed": "worker {worker} could not connect: {message}",
    "CollectiveFailed": "a collective of worker {worker} failed: {message}",
    "LoopFinished": "worker {worker} completed its last step, {version}",
    "WorkerHung": "worker {worker} hangs: {reason}",
}
"""Texts of events. Other events are not shown."""
FAULTS = frozenset({"KillRequested", "SlowRequested", "AgentKillRequested"})
"""Events that inject a fault."""
_NOTABLE_EVENTS = FAULTS | {"NodeJoined", "NodeLost", "NodesLost", "CoordinatorMoved"}
_NOTABLE_EFFECTS = frozenset({"Announce", "ReportIncident", "BeginGeneration", "StopJob"})
_EFFECTS: Mapping[str, str] = {
    "AssignRank": "worker {worker} takes rank {rank} in epoch {epoch}",
    "ReEnter": "worker {worker} runs its script again",
    "ResumeFrom": "worker {worker} resumes from version {version}",
    "SetCaptureInterval": "worker {worker} takes a snapshot every {interval} steps",
    "StopJob": "the job ended with exit code {exit_code}: {reason}",
}


@dataclass(frozen=True, slots=True)
class Event:
    """An event or decision in words. `at` is None if its time is not known."""

    at: datetime | None
    text: str


def journals_of(run_dir: Path) -> list[Path]:
    """Return the journals of a run that are on this machine, all parts of those of all leaders, the oldest first."""
    found = {*run_dir.glob(JOURNALS), *run_dir.glob(f"node-*/{JOURNALS}")}
    return sorted(found, key=_written_at)


def no_journal(run_dir: Path) -> NoSuchRunError:
    """Return the error for a run without a journal here: only leaders write one."""
    return NoSuchRunError(
        f"{run_dir}: there is no journal on this machine\n"
        "on several machines run this on the leader's: `deadpool-run status` names it; "
        "`deadpool-run ls` lists the runs of this machine"
    )


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime  # a later leader renames an earlier journal, without another line
    except FileNotFoundError:  # another launch removes it
        return 0.0


def entries(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the entries of a journal: its lines without the first. A line that cannot be read is left out."""
    for line in lines:
        try:
            found = parse(line)
        except ProtocolError:
            continue  # the last one, cut by a kill
        if isinstance(found, dict) and ("event" in found or "dropped" in found):
            yield found


class Clock:
    """The time of day of a journal's entries. They have a clock of their own, whose first time is that of the start."""

    def __init__(self, started: datetime | None) -> None:
        self._started = started
        self._first: float | None = None
        self._at: datetime | None = None

    def header(self, line: str) -> None:
        """Read the first line of a journal, or of a part of it."""
        try:
            began = parse(line).get("began")
        except (ProtocolError, AttributeError):
            return
        if isinstance(began, int | float):
            self._first = float(began)

    def time_of(self, entry: Mapping[str, Any]) -> datetime | None:
        """Return the time of the next entry, if it is known."""
        now = entry.get("now")
        if isinstance(now, int | float) and self._started is not None:
            self._first = float(now) if self._first is None else self._first
            self._at = self._started + timedelta(seconds=now - self._first)
        return self._at


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
    elif event.get("type") in FAULTS:
        yield printable(fault_text(event))
    elif event.get("type") in _EVENTS:
        yield _filled(_EVENTS[event["type"]], event)
    for effect in entry.get("effects") or ():
        yield from _effect_texts(effect)


def notable(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for the parts of an entry that the launcher's log has, too: no snapshots, no details of a repair."""
    if "dropped" in entry:
        return
    event, effects = entry.get("event") or {}, entry.get("effects") or ()
    kept = [each for each in effects if each.get("type") in _NOTABLE_EFFECTS and not each.get("detail")]
    yield from texts({"event": event if event.get("type") in _NOTABLE_EVENTS else None, "effects": kept})


def fault_text(event: Mapping[str, Any]) -> str:
    """Return an injected fault in words."""
    rank, spare = event.get("rank"), event.get("spare")
    match event.get("type"):
        case "AgentKillRequested":
            return f"the agent of node {event.get('node')} gets sigkill"
        case "SlowRequested":
            return f"rank {rank} is slowed {event.get('factor')} times for {event.get('for_s')} s"
        case _:
            return f"{f'rank {rank}' if spare is None else f'spare worker {spare}'} gets {event.get('how')}"


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
