"""Runs golden scripts: blocks of commands, `----`, and the transcript that the coordinator must give.

Commands name workers `w0 w2..w4`; `key=value` gives what differs from the default. `tick 5s` lets time pass, reaching
every deadline on the way; every command takes 10 ms.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kit.invariants import check_invariants
from msgspec.structs import asdict

from deadpool_run.core import coordinator
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.injection import KillHow
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.errors import Blame
from deadpool_run.ids import ONLY_NODE
from deadpool_run.vault.status_page import WORDS
from deadpool_run.view import job_status

_BAR = "----"


def bless_text(text: str) -> str:
    """Return the script with the transcripts that the present coordinator gives."""
    run = Run()
    blocks = []
    for block in re.split(r"\n{2,}", text.strip()):
        commands = [line for line in block.split(f"\n{_BAR}")[0].splitlines() if line.strip()]
        output = [line for command in commands if not command.startswith("#") for line in run.command(command)]
        asks = any(not command.startswith("#") for command in commands)
        blocks.append("\n".join([*commands, *([_BAR, *(output or ["(nothing)"])] if asks else [])]))
    return "\n\n".join(blocks) + "\n"


@dataclasses.dataclass(frozen=True)
class Words:
    """The words of a line of the file that follow its workers."""

    epoch: int
    number: int
    held: tuple[int, ...]
    unreached: tuple[int, ...]
    text: str
    options: dict[str, str]

    @property
    def live(self) -> int | None:
        live = self.options.get("live", str(self.number))
        return None if live == "none" else int(live)

    @property
    def step(self) -> int | None:
        return int(self.options["step"]) if "step" in self.options else None


_EVENTS: Mapping[str, Callable[[int, Words], ev.Event]] = {
    "ready": lambda w, _: ev.WorkerReady(w),
    "prepared": lambda w, _: ev.SparePrepared(w),
    "preparefailed": lambda w, say: ev.PrepareFailed(w, say.text),
    "startfailed": lambda w, say: ev.WorkerStartFailed(w, say.text),
    "init": lambda w, _: ev.ScriptInitialized(w),
    "setup": lambda w, _: ev.SetupCompleted(w),
    "transcript": lambda w, _: ev.TranscriptCompleted(w),
    "kill": lambda w, say: ev.WorkerExited(w, None, int(say.options.get("signal", 9)), say.held),
    "exit": lambda w, say: ev.WorkerExited(w, int(say.options["code"]), None, say.held),
    "raise": lambda w, say: ev.WorkerRaised(
        w,
        say.step,
        say.text.split(": ")[0],
        say.text.partition(": ")[2],
        f"Traceback of w{w}\n{say.text}",
        Blame(say.options.get("blame", "script")),
    ),
    "refuse": lambda w, say: ev.JobRefused(w, say.text.replace(" | ", "\n"), int(say.options.get("code", 94))),
    "bypass": lambda w, _: ev.LoopBypassed(w),
    "aborted": lambda w, say: ev.AbortCompleted(w, say.epoch, say.number, say.live, say.held),
    "abortfailed": lambda w, say: ev.AbortFailed(
        w,
        say.epoch,
        say.text,
        "again" in say.options,
        say.step,
        *say.text.split(": "),
        f"Traceback of w{w}\n{say.text}",
        Blame(say.options.get("blame", "script")),
    ),
    "unwound": lambda w, say: ev.RunUnwound(w, say.number, say.held),
    "rehearsed": lambda w, say: ev.ReplacementRehearsed(w, say.epoch),
    "restored": lambda w, say: ev.RankRestored(w, say.epoch),
    "attached": lambda w, say: ev.RankAttached(w, say.epoch),
    "attachfailed": lambda w, say: ev.AttachFailed(w, say.epoch, say.text, say.unreached),
    "stepped": lambda w, say: ev.FirstStepCompleted(w, say.epoch),
    "suspect": lambda w, say: ev.CollectiveFailed(w, say.epoch, say.text),
    "skip": lambda w, say: ev.CaptureSkipped(w, say.number),
    "limited": lambda w, say: ev.StepsLimited(w, say.epoch, say.number),
    "reached": lambda w, say: ev.StepsLimited(w, say.epoch, say.number, True, "uncaptured" not in say.options),
    "finished": lambda w, say: ev.LoopFinished(w, say.number),
    "hung": lambda w, say: ev.WorkerHung(w, say.text),
    "fetchfailed": lambda w, say: ev.FetchFailed(w, say.epoch, say.options["from"], say.text),
}


class Run:
    def __init__(self) -> None:
        self.settings = Settings(world_size=1)
        self.state = coordinator.new_state(self.settings)
        self.now = 0.0
        self.pids = itertools.count(100)

    def command(self, line: str) -> list[str]:
        """Carry out one command and return its part of the transcript."""
        self.now += 0.01
        name = line.split(maxsplit=1)[0]
        text = line.partition(": ")[2]
        words = line.partition(": ")[0].split()[1:]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        workers = list(_workers(plain))
        if name == "new":
            self.settings = Settings(**{key: _number(value) for key, value in options.items()})
            self.state = coordinator.new_state(self.settings)
            return []
        if name == "tick":
            return self.tick(float(plain[0].removesuffix("s")))
        if name == "show":
            return self.show()
        return [line for event in self.events(name, workers, plain, options, text) for line in self.tell(event)]

    def events(self, name, workers, plain, options, text) -> Iterator[ev.Event]:  # noqa: PLR0912 - a case for each
        numbers = [int(word) for word in plain if word.isdigit()]
        match name:
            case "start":
                yield ev.JobSubmitted(place=ev.Place(devices=int(options.get("devices", 0))))
            case "fault" if "node" in options:
                yield ev.AgentKillRequested(options["node"])
            case "fault" if "slow" in options:
                yield ev.SlowRequested(numbers[0], float(options["slow"]), float(options["for"]))
            case "fault":
                yield ev.KillRequested(numbers[0], KillHow(plain[1]))
            case "drain":
                yield ev.DrainRequested(numbers[0] if numbers else None, options.get("node"))
            case "stop":
                yield ev.StopRequested(numbers[0])
            case "join":
                order = int(options["order"]) if "order" in options else None
                for node in plain:
                    place = ev.Place(
                        name=node,
                        failure_domain=options.get("failure_domain", ""),
                        order=order,
                        devices=int(options.get("devices", 0)),
                    )
                    first = not self.state.arrivals
                    yield ev.JobSubmitted(node, place) if first else ev.NodeJoined(node, place)
            case "lose":
                losses = tuple(ev.NodeLost(node, text) for node in plain)
                yield losses[0] if len(losses) == 1 else ev.NodesLost(losses)
            case "committed":
                yield ev.SnapshotCommitted(numbers[0], self.state.epoch)
            case "nomemory":
                yield ev.CopyRefused(plain[0], int(options["rank"]))
            case "gpufailed":
                yield ev.DeviceFailed(options.get("node", ONLY_NODE), numbers[0], text)
            case "takes":
                yield ev.RefusedCopyTaken(plain[0], int(options["rank"]))
            case "holds":
                held = tuple(int(version) for version in options.get("held", "").split(",") if version)
                epoch = int(options.get("epoch", self.state.epoch))
                yield ev.ReplicasReported(plain[0], int(options["rank"]), epoch, held)
        if name in (
            "start",
            "fault",
            "drain",
            "stop",
            "join",
            "lose",
            "committed",
            "nomemory",
            "takes",
            "holds",
            "gpufailed",
        ):
            return
        words = Words(
            epoch=int(options.get("epoch", self.state.epoch)),
            number=numbers[0] if numbers else 0,
            held=tuple(int(version) for version in options.get("held", "").split(",") if version),
            unreached=tuple(int(rank) for rank in options.get("unreached", "").split(",") if rank),
            text=text,
            options=options,
        )
        for w in workers:
            if name in ("started", "ready"):
                yield ev.WorkerStarted(w, next(self.pids))
            if name == "setup":
                yield ev.ScriptInitialized(w)
            if name != "started":
                yield _EVENTS[name](w, words)

    def tell(self, event: ev.Event) -> list[str]:
        effects = coordinator.step(self.settings, self.state, event, self.now)
        check_invariants(self.settings, self.state)
        return list(_render(effects))

    def tick(self, seconds: float) -> list[str]:
        until = self.now + seconds
        lines = []
        while (deadline := coordinator.next_deadline(self.settings, self.state)) is not None and deadline <= until:
            lines.append(f"at {deadline:.2f}s")
            self.now = max(self.now, deadline)
            lines += self.tell(ev.TimeAdvanced())
        self.now = until
        return lines

    def show(self) -> list[str]:
        status = shown(self.state)
        return [
            "{phase}, epoch {epoch}, generation {generation}: {reason}".format_map(status),
            f"  a snapshot every {status['capture_interval']} steps",
            *(f"  rank {r['rank']}: {_worker(r['worker'])} {r['phase']}{_on(r['node'])}" for r in status["ranks"]),
            *(f"  spare: w{s['worker']} {s['phase']}{_on(s['node'])}" for s in status["spares"]),
        ]


def shown(state: State) -> dict[str, Any]:
    """The coordinator's part of the status, with ranks that have written nothing on the status page."""
    words = [(0,) * WORDS] * len(state.seats)
    return {**job_status.summary(state), "ranks": job_status.ranks(state, words, now=0.0)}


def _worker(worker: int | None) -> str:
    return "-" if worker is None else f"w{worker}"


def _on(node: str | None) -> str:
    return "" if node in (None, ONLY_NODE) else f" on {node}"


def _workers(words: list[str]) -> Iterator[int]:
    for word in words:
        if found := re.fullmatch(r"w(\d+)(?:\.\.w(\d+))?", word):
            first, last = found.groups()
            yield from range(int(first), int(last or first) + 1)


def _number(text: str) -> int | float:
    return int(text) if text.isdigit() else float(text)


def _render(effects: tuple[do.Effect, ...]) -> Iterator[str]:
    """One line per order; equal orders to several workers share one."""
    for (name, rest), group in itertools.groupby(map(_split, effects), key=lambda parts: parts[:2]):
        workers = " ".join(worker for _, _, worker in group if worker)
        yield "  ".join(part for part in (f"-> {name}", workers, rest) if part)


def _split(effect: do.Effect) -> tuple[str, str, str]:
    if isinstance(effect, do.ReportIncident):
        return "ReportIncident", _incident(effect.incident), ""
    parts = asdict(effect)
    worker = parts.pop("worker", None)
    told_only_if = {"node": ONLY_NODE, "transcript_from": None, "source": None, "local_rank": parts.get("rank")}
    parts = {key: value for key, value in parts.items() if key not in told_only_if or value != told_only_if[key]}
    words = [f"{key}={value!r}" if isinstance(value, bool) else f"{key}={value}" for key, value in parts.items()]
    if isinstance(effect, do.Announce):
        why = f" ({effect.reason})" if effect.reason else ""
        words = [f"{effect.what}{why}{' [ours]' if effect.ours else ''}"]
    return type(effect).__name__, " ".join(words).replace("\n", " | "), "" if worker is None else f"w{worker}"


def _incident(incident: do.Incident) -> str:
    losses = "; ".join(
        f"rank {loss.rank} w{loss.worker} {loss.cause}{' [injected]' if loss.injected else ''}"
        f"{' [planned]' if loss.planned else ''}"
        f" -> w{loss.replacement}{' (spare)' if loss.from_spare else ''}"
        for loss in incident.losses
    )
    times = " ".join(
        f"{name.removesuffix('_s')}={getattr(incident, name):.2f}"
        for name in ("detected_s", "aborted_s", "promoted_s", "rehearsed_s", "restored_s", "attached_s", "first_step_s")
        if getattr(incident, name) is not None
    )
    return f"epoch={incident.epoch} resumed={incident.resumed} repeated={incident.steps_repeated} {times} [{losses}]"
