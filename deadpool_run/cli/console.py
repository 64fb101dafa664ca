"""Our own words to the user: always on stderr, a prefix before each, never a progress bar."""

import os
import sys
from typing import Literal

Color = Literal["auto", "always", "never"]

PREFIX = "deadpool-run: "


def note(message: str) -> None:
    """Say something worth knowing."""
    sys.stderr.write(f"{PREFIX}{message}\n")


def error(message: str) -> None:
    """Say what went wrong; lines after the first are indented under it."""
    first, *rest = message.splitlines() or [""]
    sys.stderr.write("\n".join([PREFIX + first, *(f"  {line}" for line in rest)]) + "\n")


def set_color(when: str) -> None:
    """Let --color rule over NO_COLOR and FORCE_COLOR, for ourselves and for what we start."""
    if when == "auto":
        return
    os.environ.pop("FORCE_COLOR" if when == "never" else "NO_COLOR", None)
    os.environ["NO_COLOR" if when == "never" else "FORCE_COLOR"] = "1"
