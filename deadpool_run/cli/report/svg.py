"""Elements, scales and axes of the charts, as inline SVG. Pure."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from deadpool_run.text import printable

_SECONDS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400)
_MOST_TICKS = 8
_TICKS = 4


def element(name: str, content: str = "", title: str = "", **attributes: object) -> str:
    """Return an element. `content` is markup, `title` a tooltip; `_` in a name becomes a dash."""
    written = "".join(
        f' {key.strip("_").replace("_", "-")}="{escape(_number(value))}"' for key, value in attributes.items()
    )
    inside = (f"<title>{escape(printable(title))}</title>" if title else "") + content
    return f"<{name}{written}>{inside}</{name}>" if inside else f"<{name}{written}/>"


def text(x: float, y: float, words: str, **attributes: str) -> str:
    """Return a text element."""
    return element("text", escape(printable(words)), x=x, y=y, **attributes)


def path(points: Iterable[tuple[float, float]], class_: str) -> str:
    """Return a line through the points."""
    drawn = " L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    return element("path", d=f"M{drawn}", fill="none", class_=class_) if drawn else ""


def drawing(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    """Return a complete drawing, which scales to the width of the page."""
    return element("svg", "".join(parts), viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label)


def _number(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from values to coordinates."""

    least: float
    most: float
    begin: float
    end: float

    def at(self, value: float) -> float:
        """Return the coordinate of a value; a value outside the range gets that of the nearest end."""
        spread = self.most - self.least or 1.0
        share = min(1.0, max(0.0, (value - self.least) / spread))
        return self.begin + share * (self.end - self.begin)


def ticks(most: float) -> list[float]:
    """Return round numbers from 0 to the first that is not below `most`."""
    if most <= 0:
        return [0.0, 1.0]
    raw = most / _TICKS
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if factor * magnitude >= raw * 0.999)
    return [number * step for number in range(math.ceil(most / step - 1e-9) + 1)]


def time_ticks(duration: float) -> Iterator[float]:
    """Yield times for an axis."""
    step = next(
        (each for each in _SECONDS if duration / each <= _MOST_TICKS), 86400 * math.ceil(duration / 86400 / _MOST_TICKS)
    )
    return (number * float(step) for number in range(int(duration / step) + 1))


def clock(seconds: float) -> str:
    """Return a time from the start as `m:ss` or `h:mm:ss`."""
    whole = round(seconds)
    hours, minutes, left = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{left:02}" if hours else f"{minutes}:{left:02}"


@dataclass(frozen=True, slots=True)
class Frame:
    """The area of a chart, with its two axes."""

    x: Scale
    y: Scale

    def axes(self, unit: str, values: Sequence[float], duration: float) -> Iterator[str]:
        """Yield lines and labels: `values` at the left, times below."""
        for value in values:
            y = self.y.at(value)
            yield element("line", x1=self.x.begin, x2=self.x.end, y1=y, y2=y, class_="grid")
            yield text(self.x.begin - 6, y + 4, f"{value:g}", class_="tick", text_anchor="end")
        yield text(self.x.begin, self.y.end - 8, unit, class_="unit")
        yield from self.times(duration)

    def times(self, duration: float) -> Iterator[str]:
        """Yield the time axis."""
        bottom = self.y.begin
        yield element("line", x1=self.x.begin, x2=self.x.end, y1=bottom, y2=bottom, class_="axis")
        for at in time_ticks(duration):
            x = self.x.at(at)
            yield element("line", x1=x, x2=x, y1=bottom, y2=bottom + 4, class_="axis")
            yield text(x, bottom + 16, clock(at), class_="tick", text_anchor="middle")
