"""From a status object to what is shown of it. Pure: the time is an argument.

What is missing from a status is shown as `-`, so that a viewer of one version can look at a run of another.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from deadpool_run.view.health import Health, Status, health, ready_spares

PLAIN_WIDTH = 200
"""Of what is not a terminal: wide enough that no line of ours is broken in a log."""

_STYLES: Mapping[Health, str] = {
    Health.HEALTHY: "bold green",
    Health.DEGRADED: "bold yellow",
    Health.RECOVERING: "bold red",
    Health.ENDING: "bold yellow",
}
_CALM_PHASES = frozenset({"running", "finished", "released", "ready", "done", "setting up"})
_TIMES = ("detected", "drained", "promoted", "rehearsed", "restored", "attached", "first_step")


def to_json(status: Status, now: datetime) -> str:
    """Return the status as one line of JSON: times of day in ISO-8601 UTC, durations as their names say."""
    when = {
        "time": now.astimezone(UTC).isoformat(timespec="milliseconds"),
        "health": health(status).value,
    }
    return json.dumps(dict(status) | when, separators=(",", ":"))


def to_plain(status: Status, now: datetime) -> str:
    """Return the status as text without colour, for a log or a pipe."""
    out = StringIO()
    Console(file=out, width=PLAIN_WIDTH, color_system=None, force_terminal=False).print(to_rich(status, now))
    return "".join(f"{line.rstrip()}\n" for line in out.getvalue().splitlines())


def to_rich(status: Status, now: datetime) -> RenderableType:
    """Return the status as what rich can show on a terminal."""
    parts: list[RenderableType] = [_job_line(status, now)]
    if health(status) is not Health.HEALTHY and status.get("reason"):
        parts.append(Text(f"  {_printable(status['reason'])}"))
    if status.get("durable"):
        parts.append(_durable(status["durable"], now))
    parts += [Text(), _ranks(status), Text(), _spares(status)]
    if status.get("incidents"):
        parts += [Text(), _incidents(status)]
    return Group(*parts)


def _job_line(status: Status, now: datetime) -> Text:
    run = status.get("run", {})
    asked = run.get("spares", 0)
    words = [
        f"epoch {_shown(status.get('epoch'))}",
        f"world {_shown(run.get('world_size'))}",
        f"spares {len(ready_spares(status))} of {asked} ready",
        f"committed {_shown(status.get('committed'))}",
        f"up {_duration(run.get('started'), now)}",
    ]
    if status.get("restarts"):
        words.append(f"restarts {status['restarts']}")
    if status.get("capture_interval", 1) != 1:
        words.append(f"a snapshot each {status['capture_interval']} steps")
    state = str(status.get("phase", "-"))
    how = health(status)
    if how.value not in {state, "healthy"}:
        state += f" ({how})"
    return Text.assemble(
        "run ", (_printable(run.get("run_id", "-")), "bold"), "  ", (state, _STYLES[how]), "  ", "  ".join(words)
    )


def _durable(durable: Status, now: datetime) -> Text:
    """Return what would be left if all memory were lost."""
    if durable.get("version") is None:
        return Text(f"  durable: nothing yet, in {_shown(durable.get('place'))}")
    age = _duration(durable.get("written"), now)
    return Text(f"  durable: step {_shown(durable['version'])}, {age} old, in {_shown(durable.get('where'))}")


def _ranks(status: Status) -> Table:
    table = _table(("rank", "pid", "worker", "phase", "step", "snapshot", "ms/step"), left={"phase"})
    managed = status.get("managed")  # a script that never calls init() tells of no steps
    for rank in status.get("ranks", ()):
        phase = _phase(rank)
        snapshots = rank.get("snapshots") or ()
        table.add_row(
            _shown(rank.get("rank")),
            _shown(rank.get("pid")),
            _shown(rank.get("worker")),
            Text(phase, style="" if rank.get("phase") in _CALM_PHASES else "yellow"),
            _shown(rank.get("step") if managed else None),
            _shown(max(snapshots, default=None)),
            f"{rank['step_ms']:.1f}" if rank.get("step_ms") else "-",
        )
    return table


def _phase(rank: Status) -> str:
    """Return the coordinator's word, and in brackets the worker's own where it says more."""
    phase, doing = _printable(rank.get("phase", "-")), _printable(rank.get("activity") or "")
    return f"{phase} ({doing})" if doing and doing not in {phase, "none"} else phase


def _spares(status: Status) -> Text:
    spares = [
        f"worker {_shown(spare.get('worker'))} (pid {_shown(spare.get('pid'))}) {_printable(spare.get('phase', '-'))}"
        for spare in status.get("spares", ())
        if spare.get("phase") != "ended"
    ]
    return Text("spares: " + ("; ".join(spares) or "none"))


def _incidents(status: Status) -> Group:
    times = tuple(name.replace("_", " ") for name in _TIMES)
    table = _table(("epoch", "lost", "replaced by", "step", "lost steps", *times), left={"lost", "replaced by"})
    for incident in status["incidents"]:
        losses = incident.get("losses", ())
        table.add_row(
            _shown(incident.get("epoch")),
            "\n".join(_lost(loss) for loss in losses),
            "\n".join(_replaced(loss) for loss in losses),
            _shown(incident.get("resumed")),
            _shown(incident.get("steps_lost")),
            *_times(incident),
        )
    return Group(
        Text("last repairs, in ms after the loss was known (detected: from an injected fault to that):"), table
    )


def _lost(loss: Status) -> str:
    injected = ", injected" if loss.get("injected") else ""
    return f"rank {_shown(loss.get('rank'))} (worker {_shown(loss.get('worker'))}) {_printable(loss.get('cause', '-'))}{injected}"


def _replaced(loss: Status) -> str:
    return f"{'spare' if loss.get('from_spare') else 'fresh'} worker {_shown(loss.get('replacement'))}"


def _times(incident: Status) -> Iterator[str]:
    for name in _TIMES:
        seconds = incident.get(f"{name}_s")
        yield "-" if seconds is None else f"{seconds * 1000:.0f}"


def _table(columns: Sequence[str], left: set[str]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.upper(), justify="left" if column in left else "right", no_wrap=column not in left)
    return table


def _shown(value: object) -> str:
    return "-" if value is None else _printable(value)


def _printable(value: object) -> str:
    """Return the text without what could steer a terminal: causes and reasons may quote a script."""
    return "".join(character if character.isprintable() else " " for character in str(value))


def _duration(since: object, now: datetime) -> str:
    try:
        seconds = int((now - datetime.fromisoformat(str(since))).total_seconds())
    except (ValueError, TypeError):
        return "-"
    minutes, seconds = divmod(max(0, seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
