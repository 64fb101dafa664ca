"""The charts of the report, each an SVG as text. Pure."""

from collections.abc import Iterator, Sequence

from deadpool_run.agent.records.incident_line import PARTS
from deadpool_run.cli.report.history import History, RepairRecord, Sample, Tenure, thinned
from deadpool_run.cli.report.svg import Frame, Scale, clock, drawing, element, path, text, ticks
from deadpool_run.text import size

WIDTH = 960.0
MOST_POINTS = 600
MOST_BARS = 160
MOST_ROWS = 64
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 14.0, 26.0, 26.0
_HEIGHT = 240.0
_ROW = 18.0
_LEAST_PX = 1.5
"""The least width of a block, so that short events are visible."""
_CLIPPED = 1.15
"""The axis of step times ends at this multiple of the 99th percentile."""
_USUAL = 4.0
"""The axis of repairs ends at this multiple of the median: a hang that took minutes to detect would hide the other bars."""
_PER_MS = 1e3


def step_times(history: History) -> str:
    """Return the step times, with a line for each loss and each planned move."""
    shown = thinned(history.stepping(), MOST_POINTS)
    if not shown:
        return ""
    ordered = sorted(sample.step_s for sample in shown)
    most = max(ordered[int(0.99 * (len(ordered) - 1))] * _CLIPPED, 1e-6) * _PER_MS
    values = ticks(most)
    frame = _frame(history, values)
    points = [(frame.x.at(sample.now), frame.y.at(sample.step_s * _PER_MS)) for sample in shown]
    parts = [*frame.axes("ms a step, slowest rank", values, history.duration), *_incidents(history, frame)]
    parts.append(path(points, class_="line s1"))
    for sample in shown:
        over = sample.step_s * _PER_MS > values[-1]
        title = f"{clock(sample.now)}: step {sample.step:,}, {sample.step_s * _PER_MS:.1f} ms"
        x, y = frame.x.at(sample.now), frame.y.at(sample.step_s * _PER_MS)
        parts.append(element("circle", title=title, cx=x, cy=y, r=3 if over else 4, class_="over" if over else "spot"))
    return drawing(
        WIDTH, _HEIGHT, "Time of a step over the run, with a line for each loss and each planned move", parts
    )


def progress(history: History) -> str:
    """Return the completed steps over time."""
    shown = thinned(history.samples, MOST_POINTS)
    if not shown:
        return ""
    values = ticks(max(sample.step for sample in shown))
    frame = _frame(history, values)
    points = [(frame.x.at(sample.now), frame.y.at(sample.step)) for sample in shown]
    parts = [
        *frame.axes("completed steps", values, history.duration),
        *_incidents(history, frame),
        path(points, class_="line s1"),
    ]
    parts += _spots(shown, frame, [sample.step for sample in shown], "step {:,.0f}")
    return drawing(WIDTH, _HEIGHT, "Completed steps over the run", parts)


def snapshot_age(history: History) -> str:
    """Return the steps since the newest snapshot of all ranks, over time."""
    shown = [sample for sample in thinned(history.samples, MOST_POINTS) if sample.committed is not None]
    if not shown:
        return ""
    behind = [max(0, sample.step - (sample.committed or 0)) for sample in shown]
    values = ticks(max(*behind, 4))
    frame = _frame(history, values, 0.7)
    points = [(frame.x.at(sample.now), frame.y.at(value)) for sample, value in zip(shown, behind, strict=True)]
    parts = [*frame.axes("steps since the newest snapshot", values, history.duration), path(points, class_="line s5")]
    parts += _spots(shown, frame, behind, "{:,.0f} steps since the newest snapshot")
    return drawing(WIDTH, _HEIGHT * 0.7, "Age of the newest snapshot over the run", parts)


def snapshot_memory(history: History) -> str:
    """Return the memory of snapshots and copies on the leader's machine."""
    shown = thinned(history.samples, MOST_POINTS)
    most = max((sample.bytes for sample in shown), default=0)
    if not most:
        return ""
    unit, name = next(
        (1000.0**power, size(1000.0**power).split()[1]) for power in (4, 3, 2, 1, 0) if most >= 1000.0**power
    )
    values = ticks(most / unit)
    frame = _frame(history, values, 0.7)
    amounts = [sample.bytes / unit for sample in shown]
    points = [(frame.x.at(sample.now), frame.y.at(value)) for sample, value in zip(shown, amounts, strict=True)]
    parts = [*frame.axes(f"{name} for snapshots", values, history.duration), path(points, class_="line s5")]
    parts += _spots(shown, frame, amounts, f"{{:.3g}} {name}")
    return drawing(WIDTH, _HEIGHT * 0.7, "Memory of snapshots over the run", parts)


def repairs(history: History) -> str:
    """Return a bar for each repair of a loss, stacked from its parts."""
    shown = history.losses[-MOST_BARS:]
    if not shown:
        return ""
    ordered = sorted(repair.lost_s for repair in shown)
    usual = _USUAL * ordered[len(ordered) // 2]
    values = ticks(min(ordered[-1], usual) * _PER_MS)
    x, y = Scale(0, len(shown), _LEFT, WIDTH - _RIGHT), Scale(0, values[-1], _HEIGHT - _BOTTOM, _TOP)
    place = (x.end - x.begin) / len(shown)
    width = min(40.0, place * 0.7)
    parts = []
    for value in values:
        parts.append(element("line", x1=x.begin, x2=x.end, y1=y.at(value), y2=y.at(value), class_="grid"))
        parts.append(text(x.begin - 6, y.at(value) + 4, f"{value:g}", class_="tick", text_anchor="end"))
    parts.append(text(x.begin, y.end - 8, "ms from the loss to the first step", class_="unit"))
    every = -(-len(shown) // 20)
    for number, repair in enumerate(shown):
        left = x.at(number) + (place - width) / 2
        parts += _bar(repair, left, width, y)
        if number % every == 0:
            label = clock(repair.began)
            parts.append(text(left + width / 2, y.begin + 16, label, class_="tick", text_anchor="middle"))
    return drawing(WIDTH, _HEIGHT, "Repairs, each a bar of its parts", parts)


def _bar(repair: RepairRecord, left: float, width: float, y: Scale) -> Iterator[str]:
    reached = 0.0
    ranks = ", ".join(str(loss.rank) for loss in repair.incident.losses)
    for name, seconds in repair.parts():
        top, bottom = y.at((reached + seconds) * _PER_MS), y.at(reached * _PER_MS)
        if top < bottom:
            gap = 1.0 if bottom - top > 3 else 0.0  # space between two parts
            yield element(
                "rect",
                title=f"{clock(repair.began)}, rank {ranks}: {name} {seconds * _PER_MS:.0f} of {repair.lost_s * _PER_MS:.0f} ms",
                x=left,
                y=top,
                width=width,
                height=bottom - top - gap,
                class_=f"p{PARTS.index(name) + 1}",
            )
        reached += seconds
    if reached * _PER_MS > y.most:
        yield text(left + width / 2, y.end - 3, f"{reached:.1f} s", class_="tick", text_anchor="middle")


def ranks(history: History) -> str:
    """Return a row for each rank: its workers, and their set-up, training, waits, losses and moves."""
    rows = shown_ranks(history)
    height = _TOP + len(rows) * _ROW + _BOTTOM
    x = Scale(0, history.duration, _LEFT, WIDTH - _RIGHT)
    frame = Frame(x, Scale(0, 1, _TOP + len(rows) * _ROW, _TOP))
    of_rank: dict[int, list[Tenure]] = {rank: [] for rank in rows}
    for tenure in history.tenures:
        if tenure.rank in of_rank:
            of_rank[tenure.rank].append(tenure)
    parts = [text(_LEFT, _TOP - 8, "ranks", class_="unit"), *frame.times(history.duration)]
    for row, rank in enumerate(rows):
        top = _TOP + row * _ROW
        parts.append(text(_LEFT - 6, top + _ROW - 5, str(rank), class_="tick", text_anchor="end"))
        for tenure in of_rank[rank]:
            parts += _tenure(history, tenure, x, top)
        for repair in history.repairs:
            parts.append(_repair(repair, rank, x, top))
        for moment in history.moments:
            if moment.kind == "kill" and moment.rank == rank:
                mark = f"M{x.at(moment.at):.1f} {top + 1:.1f} l-4 -5 h8 z"
                parts.append(element("path", title=f"{clock(moment.at)}: {moment.text}", d=mark, class_="kill"))
    return drawing(WIDTH, height, "Ranks over time: set-up, training, repairs, losses and moves", parts)


def shown_ranks(history: History) -> list[int]:
    """Return the ranks that have a row: all, or of many ranks first those that were lost or moved."""
    every = range(history.world_size)
    if len(every) <= MOST_ROWS:
        return list(every)
    lost = {loss.rank for repair in history.repairs for loss in repair.incident.losses}
    return sorted([*sorted(lost), *(rank for rank in every if rank not in lost)][:MOST_ROWS])


def _tenure(history: History, tenure: Tenure, x: Scale, top: float) -> Iterator[str]:
    ended = history.duration if tenure.ended is None else tenure.ended
    pid = "" if tenure.pid is None else f", pid {tenure.pid}"
    end = f", then {tenure.end}" if tenure.end else ""
    title = f"rank {tenure.rank}: worker {tenure.worker}{pid} on {tenure.node}, {clock(tenure.began)} to {clock(ended)}{end}"
    set_up = tenure.began if tenure.replacement else ended if tenure.set_up is None else tenure.set_up
    if set_up > tenure.began:
        yield _block(x, top, (tenure.began, set_up), "setup", f"{title}: set-up")
    if ended > set_up:
        yield _block(x, top, (set_up, ended), "run", title)


def _repair(repair: RepairRecord, rank: int, x: Scale, top: float) -> str:
    loss = next((loss for loss in repair.incident.losses if loss.rank == rank), None)
    if loss is None:
        what = "move" if repair.planned else "repair"
        title = f"{clock(repair.began)}: waits {(repair.ended - repair.began) * _PER_MS:.0f} ms for a {what}"
        return _block(x, top, (repair.began, repair.ended), "wait", title)
    if repair.planned:
        title = f"{clock(repair.began)}: rank {rank} moves to worker {loss.replacement}: drain, {repair.lost_s:.2f} s"
        return _block(x, top, (repair.began, repair.ended), "moved", title)
    title = f"{clock(repair.began)}: rank {rank} {loss.cause}; worker {loss.replacement} takes it"
    return _block(x, top, (repair.began, repair.ended), "lost", title)


def _block(x: Scale, top: float, when: tuple[float, float], kind: str, title: str) -> str:
    left = x.at(when[0])
    width = max(x.at(when[1]) - left, _LEAST_PX)
    return element("rect", title=title, x=left, y=top + 2, width=width, height=_ROW - 4, class_=kind)


def where_time_went(history: History) -> str:
    """Return one bar: set-up, training, repairs, planned moves and repeated steps."""
    cost = history.cost()
    repaired = sum(repair.lost_s for repair in history.losses)
    moved = sum(repair.lost_s for repair in history.repairs if repair.planned)
    parts = (
        ("set-up", history.set_up_s, "setup"),
        ("training", max(0.0, history.duration - history.set_up_s - cost.lost_s), "run"),
        ("repairs", repaired, "lost"),
        ("planned moves", moved, "moved"),
        ("steps repeated", max(0.0, cost.lost_s - repaired - moved), "wait"),
    )
    x, drawn, reached = Scale(0, max(history.duration, 1e-9), 0.0, WIDTH), [], 0.0
    for name, seconds, kind in parts:
        if seconds > 0:
            title = f"{name}: {seconds:.1f} s, {100 * seconds / history.duration:.2f} %"
            width = max(x.at(seconds) - 1.0, _LEAST_PX)
            drawn.append(element("rect", title=title, x=x.at(reached), y=0, width=width, height=22, class_=kind))
            reached += seconds
    return drawing(WIDTH, 24, "Where the time went: set-up, training, repairs, planned moves, repeated steps", drawn)


def _frame(history: History, values: Sequence[float], share: float = 1.0) -> Frame:
    height = _HEIGHT * share
    return Frame(
        Scale(0, history.duration, _LEFT, WIDTH - _RIGHT), Scale(values[0], values[-1], height - _BOTTOM, _TOP)
    )


def _incidents(history: History, frame: Frame) -> Iterator[str]:
    """Yield a line for each repair and each planned move."""
    for repair in history.repairs:
        x, losses = frame.x.at(repair.began), repair.incident.losses
        if repair.planned:
            what, kind = f"drain of rank {', '.join(str(loss.rank) for loss in losses)}; moved", "move"
        else:
            what, kind = "; ".join(f"rank {loss.rank} {loss.cause}" for loss in losses) + "; repaired", "loss"
        title = f"{clock(repair.began)}: {what} in {repair.lost_s:.2f} s"
        yield element("line", x1=x, x2=x, y1=frame.y.begin, y2=frame.y.end, class_=kind, title=title)


def _spots(shown: Sequence[Sample], frame: Frame, values: Sequence[float], words: str) -> Iterator[str]:
    """Yield circles that show their value under the pointer."""
    for sample, value in zip(shown, values, strict=True):
        title = f"{clock(sample.now)}: {words.format(value)}"
        yield element("circle", title=title, cx=frame.x.at(sample.now), cy=frame.y.at(value), r=4, class_="spot")
