"""What the user is told: on stderr, never among the workers' standard output."""

import contextlib
import os

_STDERR = 2


def tell(text: str) -> None:
    """Say something to the user. A job never ends for it."""
    with contextlib.suppress(OSError):  # the terminal is gone, or takes nothing now
        os.write(_STDERR, f"deadpool-run: {text}\n".encode(errors="replace"))
