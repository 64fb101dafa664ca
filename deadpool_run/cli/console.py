"""Errors of the command line on stderr, and whether output has colors."""

import os
from typing import Literal

from deadpool_run.agent.console import tell

Color = Literal["auto", "always", "never"]


def error(message: str) -> None:
    """Print an error; lines after the first are indented."""
    tell(message.replace("\n", "\n  "))


def set_color(when: str) -> None:
    """Set NO_COLOR or FORCE_COLOR as --color asks, for this process and its children."""
    if when == "auto":
        return
    os.environ.pop("FORCE_COLOR" if when == "never" else "NO_COLOR", None)
    os.environ["NO_COLOR" if when == "never" else "FORCE_COLOR"] = "1"
