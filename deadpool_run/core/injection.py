"""Faults that a user injects, to see how the job recovers."""

from enum import StrEnum
from typing import NamedTuple


class KillHow(StrEnum):
    """How the worker dies."""

    SIGKILL = "sigkill"
    SIGTERM = "sigterm"
    SIGSEGV = "sigsegv"
    SIGSTOP = "sigstop"
    """It stops, and lives: found as a hang."""
    EXIT = "exit"
    """It ends itself, with code 1."""
    HANG = "hang"
    """It keeps the interpreter for ever, as a C function that never returns: found as a hang."""
    OOM = "oom"
    """Its script gets `torch.OutOfMemoryError`, as when a GPU is full. A spare has no step that needs memory: it ends as with `EXIT`."""


HANGS = frozenset({KillHow.SIGSTOP, KillHow.HANG})
"""The ways after which the process lives on."""


class Slowness(NamedTuple):
    """How a worker is slowed: it takes `factor` times as long for everything, for `for_s` seconds."""

    factor: float
    for_s: float

    def __str__(self) -> str:
        return f"slow:{self.factor:g} for {self.for_s:g} s"

    def description(self) -> str:
        """Return what happens to a rank, as text for messages."""
        return f"is slowed {self.factor:g} times for {self.for_s:g} s"


MAX_FACTOR = 100.0
MAX_SLOW_S = 24 * 3600.0
SLOWNESS_LIMITS = f"the factor must be above 1 and at most {MAX_FACTOR:g}, and the time at most a day"


def is_possible(slowness: Slowness) -> bool:
    """Return whether a worker can be slowed so. The limits keep the ends of its stops in sight."""
    return 1 < slowness.factor <= MAX_FACTOR and 0 < slowness.for_s <= MAX_SLOW_S
