"""A screen of the live status, line by line, for any size of terminal. Pure: the time and the log's lines are arguments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from io import StringIO

import msgspec
from rich.console import Console, OverflowMethod, RenderableType
from rich.text import Text

from deadpool_run.agent.chaos.victims import REPAIRED_IN, UNREPAIRED
from deadpool_run.agent.records.incident_line import short_line
from deadpool_run.cli.runs.events import Event
from deadpool_run.cli.screen.state import Kill, Pane, RankOrder, ScreenState
from deadpool_run.core.effects import Incident
from deadpool_run.text import moment, printable, time_of_day
from deadpool_run.view import nodes
from deadpool_run.view.health import Status
from deadpool_run.view.render import CAN_GO, LEFT_COLUMNS, header, is_calm, rank_cells, rank_columns, spares_line

_GAP = "  "
_EVENTS_SHOWN, _EVENTS_OF_TALL, _TALL = 3, 8, 30
"""Lines of events, and those on a screen with more lines than `_TALL`."""
_LEAST_ROWS = 5
"""Rows of ranks that the other parts leave room for."""
_PERCENT = 100
KEYS = (
    ("q", "quit; from the help or a log: back"),
    ("?", "this help"),
    ("s", f"next order: {', '.join(RankOrder)}"),
    ("l", "the last lines of the selected rank's log; again: back"),
    ("k", "kill the selected rank's process, after a question"),
    ("up, down", "select a rank"),
    ("page up, page down", "a page; also b and the space bar"),
    ("home, end", "the first and the last row; also g and G"),
    ("a number", "select this rank"),
    ("Ctrl-L", "draw the screen again"),
    ("Ctrl-Z, Ctrl-C", "suspend, and leave"),
)
_ABOUT = (
    "WAITS: how often the last looks saw the rank wait in a collective for others.",
    "The rank that holds up the others waits least. `slowest first` shows it first.",
    "The status is renewed each second, and after each change in the job.",
)
_PHASE_WIDTH = len("running (optimizer)")
"""The column keeps its width while ranks go from phase to phase."""

LogLines = Callable[[int, int], Sequence[str]]
"""Returns the last lines of a rank's log: up to the second number."""


@dataclass(frozen=True, slots=True)
class ScreenSize:
    """The size of a terminal, and its colours."""

    columns: int
    lines: int
    colors: str | None = None
    """One of rich's names of colour systems; None: no colours, but still bold and reversed text."""


def screen_lines(state: ScreenState, now: datetime, size: ScreenSize, log: LogLines) -> list[str]:
    """Return the lines of a screen of this size, with escape sequences for their styles. Scrolls to the selected rank."""
    columns, lines = size.columns, size.lines
    paint = _Painter(size)
    top = paint(_head(state, now), max(1, min(6, lines - 3)))
    room = lines - len(top) - 1
    match state.pane:
        case Pane.HELP:
            body = paint(_help(), room)
        case Pane.LOG:
            body = paint([_one_line(Text(line)) for line in log(state.selected, room)], room)
        case Pane.RANKS:
            body = _ranks(state, now, room, paint)
    body += [""] * (room - len(body))
    return [*top, *body[: max(0, room)], *paint([_footer(state, columns)], 1)][:lines]


class _Painter:
    """Turns texts into lines for the terminal."""

    def __init__(self, size: ScreenSize) -> None:
        self._size = size
        self.columns = size.columns

    def __call__(self, parts: Sequence[RenderableType], most: int) -> list[str]:
        """Return up to `most` lines. Text that is too long is wrapped, unless it says otherwise."""
        out = StringIO()
        console = Console(
            file=out,
            width=self._size.columns,
            color_system=self._size.colors or "standard",  # type: ignore[arg-type]  # one of rich's names
            no_color=self._size.colors is None,
            force_terminal=True,
            highlight=False,
            markup=False,
            emoji=False,
            legacy_windows=False,
        )
        for part in parts:
            if isinstance(part, Text):
                console.print(part, no_wrap=part.no_wrap, overflow=part.overflow)
            else:
                console.print(part)
        return out.getvalue().split("\n")[:-1][: max(0, most)]


def _head(state: ScreenState, now: datetime) -> list[Text]:
    first, *rest = header(state.status, now, state.pace.per_s())
    return [first, *(_one_line(line) for line in rest)]


def _one_line(text: Text, overflow: OverflowMethod = "ellipsis") -> Text:
    text.no_wrap, text.overflow = True, overflow
    return text


def _ranks(state: ScreenState, now: datetime, room: int, paint: _Painter) -> list[str]:
    """Return the table of ranks, and below it what there is room for."""
    status = state.status
    events = _events(state, now)[: _EVENTS_OF_TALL if room > _TALL else _EVENTS_SHOWN]
    below = [_one_line(line) for line in (spares_line(status), *events)]
    table = paint([nodes.nodes_table(status, paint.columns)], room) if nodes.has_several(status) else []
    spare_room = room - 2 - _LEAST_ROWS
    above = ["", *table] if table and len(table) + 1 + len(below) <= spare_room // 2 else []
    below = below[: max(0, spare_room - len(above))]
    rows = state.rows()
    state.scroll(rows, room - 2 - len(above) - len(below))
    shown = rows[state.top : state.top + state.page]
    of_ranks = rank_columns(status)
    columns = (*of_ranks, "waits")
    cells = [(*rank_cells(rank, status, of_ranks), f"{_PERCENT * state.waits(rank['rank']):.0f} %") for rank in rows]
    widths = [max(map(len, (name, *column))) for name, *column in zip(columns, *cells, strict=True)]
    layout = _fitting(dict(zip(columns, widths, strict=True)), paint.columns)
    lines = [Text(_row([name.upper() for name in columns], columns, layout), style="bold")]
    for rank, row in zip(shown, cells[state.top : state.top + state.page], strict=True):
        style = "reverse" if rank["rank"] == state.selected else "" if is_calm(rank) else "yellow"
        lines.append(Text(_row(row, columns, layout), style=style))
    table_lines = paint([_one_line(line, "crop") for line in lines], room)
    filler = [""] * max(0, state.page - len(shown))
    return [*above, "", *table_lines, *filler, *paint(below, len(below))]


def _fitting(widths: Mapping[str, int], room: int) -> dict[str, int]:
    """Return the columns that there is room for, with their widths."""
    layout = {**widths, "phase": max(widths["phase"], _PHASE_WIDTH)}
    for name in (*CAN_GO, "waits"):
        if sum(layout.values()) + len(_GAP) * (len(layout) - 1) <= room:
            break
        layout.pop(name, None)
    return layout


def _row(cells: Sequence[str], columns: Sequence[str], layout: Mapping[str, int]) -> str:
    return _GAP.join(
        cell.ljust(layout[name]) if name in LEFT_COLUMNS else cell.rjust(layout[name])
        for cell, name in zip(cells, columns, strict=True)
        if name in layout
    )


def _events(state: ScreenState, now: datetime) -> list[Text]:
    """Return a line for each of the last events, the newest first. Repairs are among them, also without records."""
    events = [*state.events]
    known = {event.text for event in events}
    for told in state.status.get("incidents", ()):
        try:
            incident = msgspec.convert({name: told[name] for name in told if name != "ended"}, Incident)
        except msgspec.ValidationError:
            continue  # of a run of another version
        if (line := printable(short_line(incident))) not in known:
            events.append(Event(moment(told.get("ended")), line))
    # Those without a time are of an earlier leader.
    events.sort(key=lambda event: (event.at is not None, event.at))
    return [Text(f"{time_of_day(event.at, now).ljust(8)}  {event.text}") for event in reversed(events)]


def _help() -> list[Text]:
    width = max(len(keys) for keys, _ in KEYS)
    lines = [Text(), *(Text(f"  {keys.ljust(width)}  {does}") for keys, does in KEYS), Text()]
    return [*lines, *(Text(f"  {line}") for line in _ABOUT)]


def _footer(state: ScreenState, columns: int) -> Text:
    """Return the last line: a question, an answer, or the keys and what is shown."""
    if state.question is not None:
        return _bar(_question(state.question, state.status), columns, "bold reverse")
    if state.message:
        return _bar(printable(state.message), columns, "bold reverse")
    if state.pane is not Pane.RANKS:
        what = f"log of rank {state.selected}" if state.pane is Pane.LOG else "help"
        return _bar(f"q back  {what}", columns, "reverse")
    count = len(state.status.get("ranks", ()))
    last = min(count, state.top + state.page)
    keys = f"q quit  ? help  s sort: {state.order}  l log  k kill"
    where = f"{state.top + 1}-{last} of {count}" if count else "no ranks"
    return _bar(
        f"{keys}{where.rjust(columns - len(keys)) if len(keys) + len(where) + 1 < columns else ''}", columns, "reverse"
    )


def _question(kill: Kill, status: Status) -> str:
    if status.get("phase") not in REPAIRED_IN:
        return f"Not protected: {UNREPAIRED}. Kill rank {kill.rank}? [y/N]"
    name = printable(status.get("run", {}).get("run_id", "-"))
    return f"Kill rank {kill.rank} (worker {kill.worker}) of {name} with sigkill? [y/N]"


def _bar(text: str, columns: int, style: str) -> Text:
    return _one_line(Text(text.ljust(columns)[:columns], style=style), "crop")
