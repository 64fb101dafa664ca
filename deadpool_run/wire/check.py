"""The plan that `deadpool-run check` gives to the workers of one run, and the files that they write for it."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

VARIABLE = "DEADPOOL_CHECK"
"""The environment variable that holds a plan as JSON. A script can read it to see that it runs under a check."""

FAULT_FILE = "fault.json"
"""Written by the worker that is about to kill itself. Created exclusively, so that a run has one fault."""
LOOP_FILE = "loop.json"
"""Written by rank 0 at the start of its step loop."""
STATES = "rank*.states.jsonl"
"""Written by every worker, with a line for each version whose state it has hashed."""


class FaultPhase(StrEnum):
    """The part of a step in which a rank is killed."""

    FORWARD = "forward"
    BACKWARD = "backward"
    COLLECTIVE = "collective"
    OPTIMIZER = "optimizer"
    CAPTURE = "capture"
    BETWEEN = "between"


@dataclass(frozen=True, slots=True)
class Fault:
    """One SIGKILL."""

    rank: int
    phase: FaultPhase
    step: int
    fraction: float
    """The point within the phase, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class CheckPlan:
    """Orders to the workers of a run: stop after some steps, write digests to a folder, have one fault."""

    steps: int
    folder: str
    fault: Fault | None = None

    def states_file(self, rank: int, worker: int) -> Path:
        """Return the file for the states of a worker while it holds this rank."""
        return Path(self.folder, STATES.replace("*", f"{rank}.{worker}"))
