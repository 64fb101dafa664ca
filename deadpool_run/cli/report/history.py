"""The history of a run, read from its record, journals and samples. Times are seconds from the start of the run."""

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deadpool_run.agent.records.incident_line import parts_of, total_s
from deadpool_run.agent.records.user_log import Cost
from deadpool_run.cli.runs.events import FAULTS, entries, fault_text, journals_of, no_journal
from deadpool_run.cli.runs.find import Run
from deadpool_run.coordinator.address import SAMPLES_NAME
from deadpool_run.core.effects import Incident
from deadpool_run.errors import ProtocolError
from deadpool_run.wire.typed import Decoder, from_plain, parse


@dataclass(frozen=True, slots=True)
class Sample:
    """The progress at one moment, as `agent.observers.samples` writes it."""

    now: float
    step: int
    step_s: float
    capture_s: float
    committed: int | None
    bytes: int


_SAMPLES: Decoder[Sample] = Decoder(Sample, "a sample")


@dataclass(slots=True)
class Tenure:
    """The time in which one worker had a rank. `ended` is None while it has it."""

    rank: int
    worker: int
    began: float
    replacement: bool
    pid: int | None = None
    node: str = ""
    set_up: float | None = None
    """Time at which it entered its step loop; None: never, or the script does not call `init()`."""
    ended: float | None = None
    end: str = ""
    """Cause of the end, such as `exit code 1`."""


@dataclass(frozen=True, slots=True)
class RepairRecord:
    """A finished repair or planned move. `began` is when the loss was known, `ended` when every rank had completed a step again."""

    began: float
    ended: float
    incident: Incident

    @property
    def planned(self) -> bool:
        """Whether nothing was lost: the ranks were drained."""
        return self.incident.planned

    @property
    def lost_s(self) -> float:
        """The duration of the repair, including the detection of an injected fault."""
        return total_s(self.incident)

    def parts(self) -> Iterator[tuple[str, float]]:
        """Yield the parts, each with the seconds that it adds to the total."""
        yield from parts_of(self.incident)


@dataclass(frozen=True, slots=True)
class Moment:
    """An event without a duration."""

    at: float
    kind: str
    """`kill`, `restart`, `node` or `leader`."""
    text: str
    rank: int | None = None


@dataclass(slots=True)
class History:
    """The data of the report."""

    record: Mapping[str, Any]
    duration: float = 0.0
    samples: list[Sample] = field(default_factory=list)
    tenures: list[Tenure] = field(default_factory=list)
    repairs: list[RepairRecord] = field(default_factory=list)
    """Repairs of losses, and planned moves."""
    moments: list[Moment] = field(default_factory=list)
    missing: int = 0
    """The number of journal entries that were dropped or cannot be read."""
    reason: str = ""
    """Reason for the end of the run; empty while it lives."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        named = int(self.record.get("world_size") or 0)
        return max([named, *(tenure.rank + 1 for tenure in self.tenures)])

    @property
    def set_up_s(self) -> float:
        """When the first rank entered its step loop; the whole run if none did."""
        return min((each.set_up for each in self.tenures if each.set_up is not None), default=self.duration)

    @property
    def losses(self) -> list[RepairRecord]:
        """The repairs of losses, without planned moves."""
        return [repair for repair in self.repairs if not repair.planned]

    def step_s(self, at: float) -> float:
        """Return the step time of the last sample before this moment; 0 without a sample."""
        index = bisect.bisect_right(self.samples, at, key=lambda sample: sample.now)
        return self.samples[index - 1].step_s if index else 0.0

    def stepping(self) -> list[Sample]:
        """Return the samples with a newly completed step. The others repeat the time of an earlier step."""
        before = [-1, *(sample.step for sample in self.samples)]
        return [
            sample
            for sample, step in zip(self.samples, before, strict=False)
            if sample.step != step and sample.step_s > 0
        ]

    def cost(self) -> Cost:
        """Return what all repairs have cost."""
        cost = Cost()
        for repair in self.repairs:
            cost.add(repair.incident, self.step_s(repair.began))
        return cost


def read_history(run: Run) -> History:
    """Return the history of a run, live or ended. Raises `NoSuchRunError` if it has no journal here."""
    journals = journals_of(run.path)
    if not journals:
        raise no_journal(run.path)
    history = History(run.record)
    reader = _Reader(history)
    for path in journals:
        with path.open(encoding="utf-8", errors="replace") as file:
            reader.header(next(file, ""))
            for entry in entries(file):
                reader.entry(entry)
    samples = [sample for path in sample_files(run.path) for sample in _samples(path)]
    history.samples = sorted(samples, key=lambda sample: sample.now)
    reader.finish()
    return history


def sample_files(run_dir: Path) -> list[Path]:
    """Return the files of samples of a run."""
    return [*run_dir.glob(SAMPLES_NAME), *run_dir.glob(f"node-*/{SAMPLES_NAME}")]


def _samples(path: Path) -> Iterator[Sample]:
    for line in path.read_bytes().splitlines():
        try:
            yield _SAMPLES.decode(line)
        except ProtocolError:
            continue  # the last one, cut by a kill


class _Reader:
    """Turns the entries of journals, one after another, into a history. Times are the journal's until `finish`."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._open: dict[int, Tenure] = {}
        """By worker."""
        self._pids: dict[int, int] = {}
        self._nodes: dict[int, str] = {}
        self._now: float | None = None
        self._began: float | None = None
        self._inherited: dict[int, int] = {}
        """Ranks by worker, which have them since before the journal."""

    def header(self, line: str) -> None:
        """Read the first line of a journal. A later leader's first line has the owners of the ranks."""
        try:
            state = parse(line).get("state") or {}
        except (ProtocolError, AttributeError):
            return
        self._inherited = {
            int(seat["owner"]): rank
            for rank, seat in enumerate(state.get("seats") or ())
            if seat.get("owner") is not None and int(seat["owner"]) not in self._open
        }

    def entry(self, entry: Mapping[str, Any]) -> None:
        """Read the next line."""
        if "dropped" in entry:
            self._history.missing += int(entry["dropped"])
            return
        now = float(entry.get("now") or 0.0)
        if self._began is None:
            self._began = now
        self._now = now
        for worker, rank in self._inherited.items():
            self._take(Tenure(rank, worker, now, replacement=False, set_up=now))
        self._inherited = {}
        self._event(entry.get("event") or {}, now)
        for effect in entry.get("effects") or ():
            self._effect(effect, now)

    def _event(self, event: Mapping[str, Any], now: float) -> None:
        worker = event.get("worker")
        match event.get("type"):
            case "WorkerStarted":
                self._pids[int(event["worker"])] = int(event["pid"])
            case "WorkerExited":
                self._end(int(event["worker"]), now, _exit(event))
            case "SetupCompleted" if worker in self._open:
                self._open[int(event["worker"])].set_up = now
            case str(kind) if kind in FAULTS:
                self._note(now, "kill", fault_text(event), event.get("rank") if event.get("spare") is None else None)
            case "NodeLost":
                self._note(now, "node", f"node {event.get('node')} was lost: {event.get('reason')}")
            case "NodesLost":
                for loss in event.get("losses") or ():
                    self._note(now, "node", f"node {loss.get('node')} was lost: {loss.get('reason')}")
            case "CoordinatorMoved":
                self._note(now, "leader", f"node {event.get('node')} leads, in term {event.get('term')}")

    def _effect(self, effect: Mapping[str, Any], now: float) -> None:
        match effect.get("type"):
            case "StartWorker":
                self._nodes[int(effect["worker"])] = str(effect.get("node") or "")
            case "AssignRank":
                worker, rank = int(effect["worker"]), int(effect["rank"])
                if worker not in self._open or self._open[worker].rank != rank:
                    self._take(Tenure(rank, worker, now, replacement=bool(effect.get("replacement"))))
            case "BeginGeneration" if effect.get("generation"):
                self._note(now, "restart", f"the world starts again (generation {effect['generation']})")
            case "ReportIncident":
                try:
                    incident = from_plain(Incident, effect.get("incident"))
                except ProtocolError:
                    self._history.missing += 1  # of another version
                    return
                self._history.repairs.append(RepairRecord(now - incident.first_step_s, now, incident))
            case "StopJob":
                self._history.reason = str(effect.get("reason") or "")

    def _take(self, tenure: Tenure) -> None:
        for other in [each for each in self._open.values() if each.rank == tenure.rank]:
            self._end(other.worker, tenure.began, "gave its rank away")
        tenure.pid, tenure.node = self._pids.get(tenure.worker), self._nodes.get(tenure.worker, "")
        self._open[tenure.worker] = tenure
        self._history.tenures.append(tenure)

    def _end(self, worker: int, now: float, how: str) -> None:
        tenure = self._open.pop(worker, None)
        if tenure is not None:
            tenure.ended, tenure.end = now, how

    def _note(self, now: float, kind: str, text: str, rank: int | None = None) -> None:
        self._history.moments.append(Moment(now, kind, text, rank))

    def finish(self) -> None:
        """Make times relative to the start."""
        history = self._history
        # The first sample may be a moment older than the first decision.
        began = min([self._began or 0.0, *(sample.now for sample in history.samples[:1])])
        last_sample = [history.samples[-1].now] if history.samples else []
        history.duration = max([began, self._now or 0.0, *last_sample]) - began
        history.samples = [
            Sample(each.now - began, each.step, each.step_s, each.capture_s, each.committed, each.bytes)
            for each in history.samples
        ]
        history.repairs = [
            RepairRecord(each.began - began, each.ended - began, each.incident) for each in history.repairs
        ]
        history.moments = [Moment(each.at - began, each.kind, each.text, each.rank) for each in history.moments]
        for tenure in history.tenures:
            tenure.began -= began
            tenure.set_up = None if tenure.set_up is None else tenure.set_up - began
            tenure.ended = None if tenure.ended is None else tenure.ended - began


def _exit(event: Mapping[str, Any]) -> str:
    return f"exit code {event['code']}" if event.get("signal") is None else f"signal {event['signal']}"


def thinned(samples: Iterable[Sample], most: int) -> list[Sample]:
    """Return at most `most` samples: the one with the longest step of each interval."""
    rest = list(samples)
    size = -(-len(rest) // most)
    if size <= 1:
        return rest
    return [max(rest[at : at + size], key=lambda sample: sample.step_s) for at in range(0, len(rest), size)]
