"""The state of the live status: order, selected rank, scrolling, and what each key does to them. Pure."""

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from deadpool_run.cli.runs.events import Event
from deadpool_run.cli.screen.keys import ESCAPE
from deadpool_run.view import nodes
from deadpool_run.view.health import Status
from deadpool_run.view.pace import Pace
from deadpool_run.view.render import is_calm

_RECENT = 0.9
"""The weight of the past in a rank's share of waiting, for each new look."""
_WAITS_LESS = 0.5
"""A rank that waits by this part less than the middle one holds the others up."""
_WAITS_SELDOM = 0.2
"""If the middle rank waits less than this, the others' shares say nothing."""
_NUMBER = re.compile(r"([0-9]+)")


class RankOrder(StrEnum):
    """The orders of the table of ranks, in the order in which `s` goes through them."""

    RANK = "rank"
    SLOWEST = "slowest first"
    NODE = "node, outliers first"


class Pane(Enum):
    """The part of the screen below the header."""

    RANKS = "ranks"
    LOG = "log"
    HELP = "help"


_PANES = {"?": Pane.HELP, "h": Pane.HELP, "l": Pane.LOG, "enter": Pane.LOG}


@dataclass(frozen=True, slots=True)
class Quit:
    """The user leaves."""


@dataclass(frozen=True, slots=True)
class Kill:
    """The user has said yes to the loss of this rank's worker."""

    rank: int
    worker: int


Action = Quit | Kill


def first_order(status: Status) -> RankOrder:
    """Return the order in which a view begins: by node if there are several."""
    return RankOrder.NODE if nodes.has_several(status) else RankOrder.RANK


@dataclass(slots=True)
class ScreenState:
    """The selected rank, the order and the view of one user. The selection keeps its rank in a new order or status."""

    status: Status
    order: RankOrder = RankOrder.RANK
    pane: Pane = Pane.RANKS
    selected: int = 0
    top: int = 0
    """The first row of the table that is shown."""
    page: int = 1
    """The number of rows that are shown."""
    question: Kill | None = None
    message: str = ""
    """The answer to the last key, until the next one."""
    pace: Pace = field(default_factory=Pace)
    """Takes each status with its time, from the viewer."""
    events: Sequence[Event] = ()
    """The last events that this machine has records of."""
    _typed: str = ""
    _has_selected: bool = False
    _waits: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.note(self.status)

    def note(self, status: Status) -> None:
        """Take a new status."""
        self.status = status
        ranks = status.get("ranks", ())
        for rank in ranks:
            number, waits = int(rank["rank"]), float(bool(rank.get("waiting")))
            self._waits[number] = _RECENT * self._waits.get(number, waits) + (1 - _RECENT) * waits
        self.selected = max(0, min(self.selected, len(ranks) - 1))

    def rank(self, number: int) -> Status:
        """Return a rank's part of the status; empty if there is none."""
        return next((rank for rank in self.status.get("ranks", ()) if rank["rank"] == number), {})

    def waits(self, rank: int) -> float:
        """Return the share of the last looks in which the rank waited for others."""
        return self._waits.get(rank, 0.0)

    def rows(self) -> list[Mapping[str, Any]]:
        """Return the ranks in the chosen order."""
        by_order: dict[RankOrder, Callable[[Mapping[str, Any]], Any]] = {
            RankOrder.RANK: lambda rank: rank["rank"],
            RankOrder.SLOWEST: self._slowness,
            RankOrder.NODE: self._by_node(),
        }
        return sorted(self.status.get("ranks", ()), key=by_order[self.order])

    def _slowness(self, rank: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the sort key of a rank: the one that needs attention, is behind, and waits least for others comes first."""
        number = int(rank["rank"])
        return is_calm(rank), rank.get("step") or 0, round(self.waits(number), 1), -(rank.get("step_ms") or 0.0), number

    def _by_node(self) -> Callable[[Mapping[str, Any]], Any]:
        """Return the sort key by node: nodes with outliers first, and in each node its outliers.

        Outliers are ranks that neither train nor do as most, then those that are behind, then those that wait less. Ranks that are alike keep their places from look to look, so steps that differ by one and step times do not count.
        """
        ranks = self.status.get("ranks", ())
        middle = statistics.median_low([rank.get("step") or 0 for rank in ranks]) if ranks else 0
        usual = statistics.mode(rank.get("phase") for rank in ranks) if ranks else ""
        waits = statistics.median(self._waits.values()) if self._waits else 0.0
        least_waits = waits * _WAITS_LESS if waits > _WAITS_SELDOM else 0.0

        def normality(rank: Mapping[str, Any]) -> int:
            troubled = not is_calm(rank) and (rank.get("phase") != usual or rank.get("slowed", 1) > 1)
            signs = (troubled, (rank.get("step") or 0) < middle - 1, self.waits(rank["rank"]) < least_waits)
            return signs.index(True) if any(signs) else len(signs)

        normal = {rank["rank"]: normality(rank) for rank in ranks}
        of_nodes: dict[str, int] = {}
        for rank in ranks:
            node, found = str(rank.get("node")), normal[rank["rank"]]
            of_nodes[node] = min(found, of_nodes.get(node, found))
        places = {node: (found, _numbered(node)) for node, found in of_nodes.items()}

        def key(rank: Mapping[str, Any]) -> tuple[Any, ...]:
            return places[str(rank.get("node"))], normal[rank["rank"]], rank["rank"]

        return key

    def scroll(self, rows: Sequence[Mapping[str, Any]], page: int) -> None:
        """Move the shown part of the rows so that the selected one is in it; the first ones until the user has selected one."""
        self.page = max(1, page)
        at = self._at(rows) if self._has_selected else 0
        self.top = max(0, min(self.top, at, len(rows) - self.page))
        self.top = max(self.top, at - self.page + 1)

    def _at(self, rows: Sequence[Mapping[str, Any]]) -> int:
        return next((at for at, rank in enumerate(rows) if rank["rank"] == self.selected), 0)

    def press(self, key: str) -> Action | None:
        """Do what a key asks for, and return what is left to be done outside."""
        self.message = ""
        if self.question is not None:
            asked, self.question = self.question, None
            if key in {"y", "Y"}:
                return asked
            self.message = "nothing was killed"
            return None
        typed, self._typed = self._typed, ""
        if key in {"k", *_PANES}:
            self._select_shown()
        if key in {"q", "Q", ESCAPE} and self.pane is not Pane.RANKS:
            self.pane = Pane.RANKS
        elif key in {"q", "Q"}:
            return Quit()
        elif key in _PANES:
            self.pane = Pane.RANKS if self.pane is _PANES[key] else _PANES[key]
        elif key == "s":
            self._next_order()
        elif key == "k":
            self._ask()
        elif key.isdecimal():
            self._type(typed + key)
        else:
            self._move(key)
        return None

    def _select_shown(self) -> None:
        """Select the first row that is shown, if the user has selected none: keys act on what can be seen."""
        rows = self.rows()
        if rows and not self._has_selected and self.order is not RankOrder.RANK:
            self.selected, self._has_selected = int(rows[min(self.top, len(rows) - 1)]["rank"]), True

    def _next_order(self) -> None:
        orders = [order for order in RankOrder if order is not RankOrder.NODE or nodes.has_several(self.status)]
        self.order = orders[(orders.index(self.order) + 1) % len(orders)]

    def _type(self, digits: str) -> None:
        """Select the rank whose number is being typed."""
        if int(digits) < len(self.status.get("ranks", ())):
            self._typed, self.selected, self._has_selected = digits, int(digits), True
        else:
            self.message = f"there is no rank {digits}"

    def _move(self, key: str) -> None:
        rows = self.rows()
        far = len(rows)
        steps = {"up": -1, "down": 1, "page up": -self.page, "page down": self.page, " ": self.page, "b": -self.page}
        steps |= {"home": -far, "g": -far, "end": far, "G": far}
        if rows and key in steps:
            at = self._at(rows) if self._has_selected else self.top
            self.selected, self._has_selected = int(rows[max(0, min(far - 1, at + steps[key]))]["rank"]), True

    def _ask(self) -> None:
        rank = self.rank(self.selected)
        if rank.get("worker") is None:
            self.message = f"no worker holds rank {self.selected} now"
        else:
            self.question = Kill(self.selected, int(rank["worker"]))


def _numbered(name: str) -> list[tuple[int, str]]:
    """Return a sort key that has `n9` before `n10`."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in _NUMBER.split(name)]
