"""The launcher's messages: on stderr, each with a prefix."""

import os
import sys
from typing import Literal

Color = Literal["auto", "always", "never"]

PREFIX = "deadpool-run: "


def note(message: str) -> None:
    """Write a note."""
    sys.stderr.write(f"{PREFIX}{message}\n")


def error(message: str) -> None:
    """Write an error; lines after the first are indented."""
    first, *rest = message.splitlines() or [""]
    sys.stderr.write("\n".join([PREFIX + first, *(f"  {line}" for line in rest)]) + "\n")


def set_color(when: str) -> None:
    """Set NO_COLOR or FORCE_COLOR as --color asks, for this process and its children."""
    if when == "auto":
        return
    os.environ.pop("FORCE_COLOR" if when == "never" else "NO_COLOR", None)
    os.environ["NO_COLOR" if when == "never" else "FORCE_COLOR"] = "1"
