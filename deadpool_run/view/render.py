"""The status as a table, text or JSON. Pure: the time is an argument.

Missing values are shown as `-`, so a viewer can show a run of another version.
"""

import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from deadpool_run.core.effects import PHASES
from deadpool_run.text import age, counted, printable, size, span, time_of_day
from deadpool_run.vault.status_page import DeviceLibrary
from deadpool_run.view import capture_limit, nodes
from deadpool_run.view.collectives import described
from deadpool_run.view.health import JobHealth, Status, health, without_copies, without_memory
from deadpool_run.view.pace import completed
from deadpool_run.view.text import fitted, shown

PLAIN_WIDTH = 200
"""Width without a terminal: no line wraps in a log."""
_PERCENT = 100.0
_MS_PER_S = 1e3

_STYLES: Mapping[JobHealth, str] = {
    JobHealth.HEALTHY: "bold green",
    JobHealth.STARTING: "bold yellow",
    JobHealth.UNPROTECTED: "bold red",
    JobHealth.DEGRADED: "bold yellow",
    JobHealth.RECOVERING: "bold red",
    JobHealth.ENDING: "bold yellow",
}
_CALM_PHASES = frozenset({"running", "finished", "released", "ready", "done", "setting up"})
LEFT_COLUMNS = frozenset({"node", "phase"})
CAN_GO = ("worker", "snapshot", "pid", "memory", "gpu", "cpu", "ms/step")
"""Columns of ranks that a narrow terminal does without, the first one first."""


def to_json(status: Status, now: datetime) -> str:
    """Return the status as one line of JSON: times in ISO-8601 UTC, durations in the unit of their names."""
    time = now.astimezone(UTC).isoformat(timespec="milliseconds")
    return json.dumps({**status, "time": time, "health": health(status)}, separators=(",", ":"))


def to_plain(status: Status, now: datetime, width: int = PLAIN_WIDTH, per_s: float | None = None) -> str:
    """Return the status as plain text, for a log or a pipe. `per_s`: as for `header`."""
    out = StringIO()
    console = Console(file=out, width=width, color_system=None, force_terminal=False)
    console.print(to_rich(status, now, width, per_s))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def to_rich(status: Status, now: datetime, width: int, per_s: float | None = None) -> RenderableType:
    """Return the status for a terminal of this width. `per_s`: as for `header`."""
    parts: list[RenderableType] = [*header(status, now, per_s)]
    if nodes.has_several(status):
        parts += [Text(), nodes.nodes_table(status, width)]
    parts += [Text(), _ranks(status, width), Text(), spares_line(status)]
    if status.get("incidents"):
        parts += [Text(), _incidents(status, now, width)]
    return Group(*parts)


def header(status: Status, now: datetime, per_s: float | None = None) -> list[Text]:
    """Return the lines about the job as a whole. `per_s`: steps per second; None: those of the slowest rank's last step."""
    lines = [_job_line(status, now)]
    if why := _why(status):
        lines.append(Text(f"  {printable(why)}"))
    if progress := _progress(status, per_s):
        lines.append(Text(f"  {progress}"))
    if library := status.get("device_library"):
        lines.append(Text(f"  collectives on GPUs: {described(DeviceLibrary.named(str(library)))}"))
    if limit := capture_limit.words(status):
        lines.append(Text(f"  {limit}"))
    if status.get("draining"):
        lines.append(Text(f"  {_draining(status['draining'])}"))
    if status.get("durable"):
        lines.append(_durable(status["durable"], now))
    return lines


def _why(status: Status) -> str:
    """Return why the run is not healthy; empty if it is, or has just started."""
    how = health(status)
    if how in {JobHealth.HEALTHY, JobHealth.STARTING}:
        return ""
    return str(status.get("unprotected_reason" if how is JobHealth.UNPROTECTED else "reason") or "")


def _job_line(status: Status, now: datetime) -> Text:
    run, short, refused = status.get("run", {}), without_memory(status), without_copies(status)
    words = [
        f"epoch {shown(status.get('epoch'))}",
        *([f"no memory for snapshots of {len(short)} rank{'s' * (len(short) > 1)}"] if short else []),
        *([f"no memory for {refused} cop{'ies' if refused > 1 else 'y'}"] if refused else []),
        f"world {shown(run.get('world_size'))}",
        *nodes.spares(status),
        f"committed {shown(status.get('committed'))}",
        f"up {age(run.get('started'), now)}",
    ]
    words += nodes.words(status)
    if status.get("restarts"):
        words.append(f"restarts {status['restarts']}")
    if status.get("capture_interval", 1) != 1:
        words.append(f"a snapshot every {status['capture_interval']} steps")
    words += [
        f"{count} lines of the {name} dropped" for name, count in status.get("dropped_lines", {}).items() if count
    ]
    state = str(status.get("phase", "-"))
    how = health(status)
    if how.value not in {state, "healthy"}:
        state += f" ({how})"
    return Text.assemble(
        "run ", (printable(run.get("run_id", "-")), "bold"), "  ", (state, _STYLES[how]), "  ", "  ".join(words)
    )


def _progress(status: Status, per_s: float | None) -> str:
    """Return the steps done, their rate and the time that is left, and what repairs have cost; empty outside a step loop."""
    ranks = status.get("ranks", ()) if status.get("managed") else ()
    done = completed(status)
    step_ms = max((rank.get("step_ms") or 0.0 for rank in ranks), default=0.0)
    per_s = per_s or (_MS_PER_S / step_ms if step_ms else None)
    total, cost = status.get("total_steps"), status.get("cost") or {}
    words = []
    if total:
        words.append(f"step {done:,}/{total:,} ({_PERCENT * done / total:.0f} %)")
    if total and per_s:
        words.append(f"{per_s:.3g} steps/s")
    if total and per_s and done < total:
        words.append(f"{span((total - done) / per_s)} left")
    kinds = ((cost.get("repairs", 0), "repair"), (cost.get("moves", 0), "planned move"))
    if counts := [counted(number, what) for number, what in kinds if number]:
        repeated, goodput = counted(cost.get("steps_repeated", 0), "step"), cost.get("goodput", 1.0)
        words.append(
            f"{', '.join(counts)}: {cost.get('lost_s', 0.0):.1f} s lost, "
            f"{repeated} repeated, goodput {_PERCENT * goodput:.1f} %"
        )
    return "  ".join(words)


def _draining(draining: Status) -> str:
    """Return the line about ranks that are about to move."""
    ranks = ", ".join(map(str, draining.get("ranks", ())))
    of = "" if draining.get("node") is None else f" of node {printable(draining['node'])}"
    at = draining.get("at")
    return f"draining rank {ranks}{of}: " + ("spares prepare" if at is None else f"all ranks stop after step {at}")


def _durable(durable: Status, now: datetime) -> Text:
    """Return the line about the newest durable checkpoint."""
    if durable.get("version") is None:
        return Text(f"  durable: nothing yet, in {shown(durable.get('place'))}")
    written = age(durable.get("written"), now)
    return Text(f"  durable: step {shown(durable['version'])}, {written} old, in {shown(durable.get('where'))}")


def rank_columns(status: Status) -> tuple[str, ...]:
    """Return the columns of the table of ranks."""
    home = ("node",) if nodes.has_several(status) else ()
    gpu = ("gpu",) if any(rank.get("gpu_memory_bytes") is not None for rank in status.get("ranks", ())) else ()
    return ("rank", *home, "pid", "worker", "phase", "step", "snapshot", "ms/step", "cpu", "memory", *gpu)


def rank_cells(rank: Status, status: Status, columns: Collection[str]) -> tuple[str, ...]:
    """Return the values of a rank for these columns."""
    snapshots, cpu = rank.get("snapshots") or (), rank.get("cpu_cores")
    return (
        shown(rank.get("rank")),
        *((shown(rank.get("node")),) if nodes.has_several(status) else ()),
        shown(rank.get("pid")),
        shown(rank.get("worker")),
        _phase(rank),
        shown(rank.get("step") if status.get("managed") else None),  # a script that never calls init() reports no steps
        shown(max(snapshots, default=None)),
        f"{rank['step_ms']:.1f}" if rank.get("step_ms") else "-",
        "-" if cpu is None else f"{_PERCENT * cpu:.0f} %",
        size(rank.get("memory_bytes")),
        *([_gpu(rank)] if "gpu" in columns else []),
    )


def _gpu(rank: Status) -> str:
    """Return how busy the rank's GPU is, and the memory in use on it."""
    percent, memory = rank.get("gpu_percent"), rank.get("gpu_memory_bytes")
    words = ([] if percent is None else [f"{percent} %"]) + ([] if memory is None else [size(memory)])
    return ", ".join(words) or "-"


def is_calm(rank: Status) -> bool:
    """Return whether the rank is in a phase that needs no attention, and no fault slows it."""
    return rank.get("phase") in _CALM_PHASES and rank.get("slowed", 1) <= 1


def _ranks(status: Status, width: int) -> Table:
    columns = rank_columns(status)
    phase_at = columns.index("phase")
    rows = []
    for rank in status.get("ranks", ()):
        cells: list[str | Text] = [*rank_cells(rank, status, columns)]
        cells[phase_at] = Text(_phase(rank), style="" if is_calm(rank) else "yellow")
        rows.append(cells)
    return fitted(columns, rows, left=LEFT_COLUMNS, width=width, can_go=CAN_GO)


def _phase(rank: Status) -> str:
    """Return the coordinator's phase; in brackets the worker's own activity if it adds anything, and how a fault slows it."""
    phase, doing = printable(rank.get("phase", "-")), printable(rank.get("activity") or "")
    more = [doing] if doing and doing not in {phase, "none"} else []
    if rank.get("slowed", 1) > 1:
        more.append(f"slowed {rank['slowed']:g}x")
    return f"{phase} ({', '.join(more)})" if more else phase


def spares_line(status: Status) -> Text:
    """Return the line about the spares."""
    several = nodes.has_several(status)
    spares = [_spare(spare, several=several) for spare in status.get("spares", ()) if spare.get("phase") != "ended"]
    return Text("spares: " + ("; ".join(spares) or "none"))


def _spare(spare: Status, *, several: bool) -> str:
    where = f"{shown(spare.get('node'))}, " if several else ""
    phase, rank = printable(spare.get("phase", "-")), spare.get("prepared")
    doing = phase if rank is None else f"{phase} as rank {shown(rank)}"
    return f"worker {shown(spare.get('worker'))} ({where}pid {shown(spare.get('pid'))}) {doing}"


def _incidents(status: Status, now: datetime, width: int) -> Group:
    several = nodes.has_several(status)
    times = {name: name.replace("_", " ") for name in PHASES} | ({"exposed": "copies"} if several else {})
    left = ("lost or moved", "replaced by")
    rows = []
    for incident in status["incidents"]:
        losses, planned = incident.get("losses", ()), is_planned(incident)
        rows.append(
            (
                shown(incident.get("epoch")),
                time_of_day(incident.get("ended"), now),
                "\n".join(_lost(loss, planned=planned) for loss in losses),
                "\n".join(
                    f"{'spare' if loss.get('from_spare') else 'fresh'} worker {shown(loss.get('replacement'))}"
                    for loss in losses
                ),
                shown(incident.get("resumed")),
                shown(incident.get("steps_repeated")),
                *(_milliseconds(incident.get(f"{name}_s")) for name in times),
            )
        )
    columns = ("epoch", "ended", *left, "step", "repeated", *times.values())
    can_go = [*(name for name in times.values() if name != "first step"), "epoch"]
    found = fitted(columns, rows, left=left, width=width, can_go=can_go, wraps={"lost or moved": 26})
    notes = "detected: after an injected fault" + ("; copies: until they were complete again" if several else "")
    return Group(Text(f"last repairs and moves, in ms after the loss was detected ({notes}):"), found)


def is_planned(incident: Status) -> bool:
    """Return whether nothing was lost: the ranks were drained. As `Incident.planned`."""
    losses = incident.get("losses", ())
    return bool(losses) and all(loss.get("planned") for loss in losses) and not incident.get("steps_repeated")


def _lost(loss: Status, *, planned: bool) -> str:
    injected = ", injected" if loss.get("injected") else ""
    what = "moved by drain" if planned else f"{printable(loss.get('cause', '-'))}{injected}"
    return f"rank {shown(loss.get('rank'))} (worker {shown(loss.get('worker'))}) {what}"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.0f}"
