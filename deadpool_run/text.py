"""Words for messages that several rooms write."""

import re
from collections.abc import Sequence

_UNITS = ("B", "kB", "MB", "GB", "TB")
_STEP = 1000.0
_PASSWORD = re.compile(r"://([^/\s:@]*):[^/\s]*@")


def shortened(names: Sequence[str], most: int = 3) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def size(nbytes: float | None) -> str:
    """Return bytes with three digits and a unit."""
    if nbytes is None:
        return "-"
    amount, unit = float(nbytes), 0
    while amount >= _STEP and unit < len(_UNITS) - 1:
        amount, unit = amount / _STEP, unit + 1
    return f"{amount:.0f} {_UNITS[unit]}" if unit == 0 else f"{amount:.3g} {_UNITS[unit]}"


def printable(value: object) -> str:
    """Return the text without control characters, because it may quote a script, or somebody on the network."""
    return "".join(character if character.isprintable() else " " for character in str(value))


def without_passwords(text: str) -> str:
    """Return the text with `***` for the passwords of URLs."""
    return _PASSWORD.sub(r"://\1:***@", text)
