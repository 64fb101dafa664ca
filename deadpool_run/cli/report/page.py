"""The report as one HTML page that loads nothing: its content policy forbids it. Pure."""

import statistics
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from deadpool_run.agent.records.incident_line import PARTS
from deadpool_run.agent.records.user_log import ranks_and_spares
from deadpool_run.cli.report import charts
from deadpool_run.cli.report.history import History, RepairRecord
from deadpool_run.cli.report.svg import clock
from deadpool_run.text import printable, size, span

_MOST_INCIDENTS = 500
_PERCENT = 100.0

_STYLE = """
:root { color-scheme: light dark; --ground: #fcfcfb; --card: #ffffff; --ink: #14171c; --muted: #5d6470; --line: #e3e5e8;
  --s1: #2a78d6; --s2: #1baf7a; --s3: #eda100; --s4: #008300; --s5: #4a3aa7; --s6: #e34948; --s7: #e87ba4;
  --idle: #c3c8cf; --run: #a9cdb8; --wait: #f0c469; --lost: #d43d3c; --moved: #4a7fb5; }
@media (prefers-color-scheme: dark) { :root { --ground: #16181b; --card: #1e2124; --ink: #eceef0; --muted: #a2a9b3; --line: #33383e;
  --s1: #3987e5; --s2: #199e70; --s3: #c98500; --s4: #2f9b2f; --s5: #9085e9; --s6: #e66767; --s7: #d55181;
  --idle: #565d66; --run: #2f6b4c; --wait: #b5852a; --lost: #e66767; --moved: #6fa3d8; } }
body { margin: 0 auto; max-width: 1040px; padding: 24px 20px 60px; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 34px 0 2px; } p { margin: 4px 0; }
.muted, .tick, .unit, caption, th { color: var(--muted); fill: var(--muted); }
.verdict { margin: 14px 0; padding: 8px 14px; border-left: 4px solid var(--s2); background: var(--card); }
.verdict.bad { border-color: var(--lost); }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(148px, 1fr)); gap: 10px; margin: 18px 0; }
.tiles div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
.tiles b { display: block; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles span { color: var(--muted); font-size: 13px; }
svg { display: block; width: 100%; height: auto; font-size: 12px; }
.tick, .unit { font-size: 11px; } .grid { stroke: var(--line); } .axis { stroke: var(--muted); }
.line { stroke-width: 1.6; stroke-linejoin: round; } .line.s1 { stroke: var(--s1); } .line.s5 { stroke: var(--s5); }
.spot { fill: transparent; } .spot:hover { fill: var(--ink); } .over { fill: var(--s6); }
.loss { stroke: var(--lost); stroke-width: 1.2; stroke-dasharray: 3 3; } .move { stroke: var(--moved); stroke-width: 1.2; stroke-dasharray: 1 4; }
.loss:hover, .move:hover { stroke-width: 4; stroke-dasharray: none; }
.p1 { fill: var(--s7); } .p2 { fill: var(--idle); } .p3 { fill: var(--s3); } .p4 { fill: var(--s1); } .p5 { fill: var(--s2); }
.p6 { fill: var(--s5); } .p7 { fill: var(--s6); }
.setup { fill: var(--idle); } .run { fill: var(--run); } .wait { fill: var(--wait); } .lost { fill: var(--lost); } .moved { fill: var(--moved); } .kill { fill: var(--ink); }
rect:hover { opacity: .75; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--muted); margin: 4px 0 6px; }
.legend svg { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; } td.n, th.n { text-align: right; } .scroll { overflow-x: auto; }
"""


def page(history: History) -> str:
    """Return the page."""
    name = str(history.record.get("run_id") or "run")
    body = "\n".join(part for part in (_head(history, name), _tiles(history), *_sections(history)) if part)
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(name)}: deadpool-run report</title><style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _text(value: object) -> str:
    return escape(printable(value))


def _head(history: History, name: str) -> str:
    record = history.record
    spare_nodes = int(record.get("spare_nodes") or 0)
    ranks = ranks_and_spares(history.world_size, int(record.get("spares") or 0), spare_nodes)
    machines = int(record.get("nodes") or 1) + spare_nodes
    where = (
        f"on {_count(machines, 'machine')}, led by {record.get('host')}" if machines > 1 else f"on {record.get('host')}"
    )
    command = " ".join(str(word) for word in record.get("command") or ())
    code = record.get("exit_code")
    end = f"ended with exit code {code}: {record.get('reason')}" if record.get("ended") else "has not ended"
    chaos: Mapping[str, Any] = record.get("chaos") or {}
    faults = _count(sum(moment.kind == "kill" for moment in history.moments), "fault")
    plan = f"<p>Chaos run: {_text(chaos.get('plan'))}; seed {_text(chaos.get('seed'))}: {faults}.</p>" if chaos else ""
    missing = (
        f"<p>{_count(history.missing, 'entry', 'entries')} of the journal cannot be read.</p>"
        if history.missing
        else ""
    )
    return (
        f"<h1>{_text(name)}</h1>\n"
        f'<p class="muted">{_text(command)}<br>{_text(ranks)} {_text(where)}; started {_text(record.get("started"))}</p>\n'
        f'<div class="verdict{" bad" if code else ""}"><p>The run {_text(end)}.</p>{plan}{missing}</div>'
    )


def _tiles(history: History) -> str:
    cost = history.cost()
    times = [sample.step_s for sample in history.stepping()]
    behind = [sample.step - sample.committed for sample in history.samples if sample.committed is not None]
    shown = [
        (span(history.duration), "duration"),
        (f"{max((sample.step for sample in history.samples), default=0):,}", "steps completed"),
        (f"{statistics.median(times) * 1e3:.3g} ms" if times else "-", "median step"),
        (str(cost.repairs), "repairs"),
        *([(str(cost.moves), "planned moves")] if cost.moves else []),
        (str(cost.steps_repeated), "steps repeated"),
        (f"{cost.lost_s:.1f} s", "time lost"),
        (f"{_PERCENT * cost.goodput(history.duration):.2f} %", "goodput"),
        (f"{max(0, statistics.median(behind)):g} steps" if behind else "-", "median snapshot age"),
        (size(max((sample.bytes for sample in history.samples), default=0) or None), "most snapshot memory"),
    ]
    return f'<div class="tiles">{"".join(f"<div><b>{_text(value)}</b><span>{name}</span></div>" for value, name in shown)}</div>'


def _sections(history: History) -> Iterator[str]:
    moves = any(repair.planned for repair in history.repairs)
    states = (
        ("setup", "set-up"),
        ("run", "training"),
        ("wait", "waiting for a repair or a move" if moves else "waiting for a repair"),
        ("lost", "lost, being replaced"),
        *([("moved", "drained, being moved")] if moves else []),
    )
    parts_of_time = (
        ("setup", "set-up"),
        ("run", "training"),
        ("lost", "repairs"),
        *([("moved", "planned moves")] if moves else []),
        ("wait", "steps repeated"),
    )
    yield _section("Where the time went", "", charts.where_time_went(history), parts_of_time)
    dotted = " A dotted line is a planned move." if moves else ""
    note = f"A dashed line is a loss.{dotted} A dot at the top is a step beyond the axis."
    yield _section("Step times", note, charts.step_times(history))
    parts = tuple((f"p{number + 1}", name) for number, name in enumerate(PARTS))
    more = len(history.losses) - charts.MOST_BARS
    note = "Each part is what it adds to the total, as parts overlap. A bar with a number goes beyond the axis."
    yield _section(
        "Repairs",
        note + (f" The last {charts.MOST_BARS} are shown." if more > 0 else ""),
        charts.repairs(history),
        parts,
    )
    hidden = history.world_size - len(charts.shown_ranks(history))
    note = "A triangle is an injected fault." + (
        f" {hidden} more ranks, which were not lost or moved first, are left out." if hidden else ""
    )
    yield _section("Ranks over time", note, charts.ranks(history), states)
    yield _section("Progress", "", charts.progress(history))
    note = "A loss repeats about as many steps."
    yield _section("Snapshot age", note, charts.snapshot_age(history))
    yield _section("Snapshot memory", "Snapshots and copies on the leader's machine.", charts.snapshot_memory(history))
    yield _incidents(history)
    yield _moments(history)
    yield '<p class="muted" style="margin-top:30px">Made by <code>deadpool-run report</code> from the run\'s journal and samples.</p>'


def _section(title: str, note: str, chart: str, legend: tuple[tuple[str, str], ...] = ()) -> str:
    if not chart:
        return ""
    keys = "".join(
        f'<span><svg viewBox="0 0 10 10"><rect width="10" height="10" rx="2" class="{kind}"/></svg>{name}</span>'
        for kind, name in legend
    )
    shown = f'<div class="legend">{keys}</div>' if keys else ""
    return f"<h2>{title}</h2>{f'<p class=muted>{_text(note)}</p>' if note else ''}{shown}\n{chart}"


def _incidents(history: History) -> str:
    none = "" if history.losses else "<p>No rank was lost.</p>"
    if not history.repairs:
        return f"<h2>Incidents</h2>{none}"
    shown = history.repairs[-_MOST_INCIDENTS:]
    names = "".join(f'<th class="n">{name}</th>' for name in PARTS)
    rows = "".join(_incident(repair) for repair in shown)
    left_out = len(history.repairs) - len(shown)
    note = none + (f"<p class=muted>The last {len(shown)} of {len(history.repairs)}.</p>" if left_out else "")
    return (
        f"<h2>Incidents</h2>{note}<div class=scroll><table><thead><tr><th>at</th><th>ranks</th><th>cause</th><th>replaced by</th>"
        f'<th class="n">resumed at</th><th class="n">repeated</th>{names}<th class="n">total ms</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _incident(repair: RepairRecord) -> str:
    incident = repair.incident
    lost = [str(loss.rank) for loss in incident.losses]
    causes = (
        ["moved by drain"] * len(lost)
        if repair.planned
        else [f"{loss.cause}{' (injected)' if loss.injected else ''}" for loss in incident.losses]
    )
    places = [f"{'spare' if loss.from_spare else 'fresh'} worker {loss.replacement}" for loss in incident.losses]
    texts = "".join(
        f"<td>{'<br>'.join(map(_text, cells))}</td>" for cells in ([clock(repair.began)], lost, causes, places)
    )
    numbers = [incident.resumed, incident.steps_repeated, *(f"{seconds * 1e3:.0f}" for _, seconds in repair.parts())]
    cells = "".join(f'<td class="n">{number}</td>' for number in [*numbers, f"{repair.lost_s * 1e3:.0f}"])
    return f"<tr>{texts}{cells}</tr>"


def _moments(history: History) -> str:
    shown = [moment for moment in history.moments if moment.kind != "kill"][-_MOST_INCIDENTS:]
    if not shown:
        return ""
    rows = "".join(f"<tr><td>{clock(moment.at)}</td><td>{_text(moment.text)}</td></tr>" for moment in shown)
    return f"<h2>Machines and restarts</h2><table><tbody>{rows}</tbody></table>"


def _count(number: int, what: str, many: str = "") -> str:
    return f"{number:,} {what if number == 1 else many or f'{what}s'}"
