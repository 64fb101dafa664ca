"""Words for messages that several folders use."""

import re
from collections.abc import Sequence
from datetime import datetime

_UNITS = ("B", "kB", "MB", "GB", "TB")
_STEP = 1000.0
_PASSWORD = re.compile(r"://([^/\s:@]*):[^/\s]*@")


def shortened(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def counted(number: int, what: str) -> str:
    """Return a number of things, such as `1 step` or `3 steps`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def size(nbytes: float | None) -> str:
    """Return bytes with three digits and a unit."""
    if nbytes is None:
        return "-"
    amount, unit = float(nbytes), 0
    while round(amount) >= _STEP and unit < len(_UNITS) - 1:
        amount, unit = amount / _STEP, unit + 1
    return f"{amount:.0f} {_UNITS[unit]}" if unit == 0 else f"{amount:.3g} {_UNITS[unit]}"


def printable(value: object) -> str:
    """Return the text without control characters, because it may quote a script, or somebody on the network."""
    return "".join(character if character.isprintable() else " " for character in str(value))


def clipped(text: str, most: int = 64 << 10) -> str:
    """Return the text, without its middle if it has more than about `most` characters: a frame has a limit."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}\n... ({len(text) - most} characters) ...\n{text[-(most // 2) :]}"


def without_passwords(text: str) -> str:
    """Return the text with `***` for the passwords of URLs."""
    return _PASSWORD.sub(r"://\1:***@", text)


def age(since: object, now: datetime) -> str:
    """Return the time from an ISO-8601 text to now, such as `42s`, `5m03s`, `2h07m` or `3d4h`; `-` if there is no such text."""
    began = moment(since)
    return "-" if began is None else span(max(0, int((now - began).total_seconds())))


def time_of_day(at: object, now: datetime) -> str:
    """Return a local time from an ISO-8601 text, such as `04:05:06`, or `02-03 04:05` on another day; `-` without one."""
    found = moment(at)
    if found is None:
        return "-"
    local = found.astimezone()
    return local.strftime("%H:%M:%S" if local.date() == now.astimezone().date() else "%m-%d %H:%M")


def moment(text: object) -> datetime | None:
    """Return the time of an ISO-8601 text with a time zone; None if it is no such text."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return None if found.tzinfo is None else found


def span(seconds: float) -> str:
    """Return a time in seconds as `42s`, `5m03s`, `2h07m` or `3d4h`."""
    minutes, left = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, day_hours = divmod(hours, 24)
    if days > 1:
        return f"{days}d{day_hours}h"
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{left:02}s" if minutes else f"{left}s"
