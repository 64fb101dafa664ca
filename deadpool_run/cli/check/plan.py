"""The choice of faults of `deadpool-run check`: rank, phase and step. Pure."""

import itertools
import math
import random
from collections.abc import Iterator

from deadpool_run.errors import UsageError
from deadpool_run.wire.check import Fault, FaultPhase

FIRST_STEP = 4
"""First step of a fault. Right after the rehearsed steps 0 and 1, state that a repair leaves out would not show."""
STEPS_AFTER = 2
"""Steps after a fault, so that its effect on the weights shows."""
LEAST_STEPS = FIRST_STEP + STEPS_AFTER + 1


def plan_faults(ranks: int, steps: int, asked: str, seed: int) -> list[Fault]:
    """Return the faults of a check, one for each run.

    asked: a number, `all` (every rank in every phase), or empty (enough to kill every rank once and meet every phase
    once). Raises `UsageError` if the script has too few steps.
    """
    if steps < LEAST_STEPS:
        raise UsageError(
            f"the script's loop has {steps} steps: too few for a fault\nmake it at least {LEAST_STEPS} steps long"
        )
    count = fault_count(asked, ranks)
    chosen = random.Random(seed)  # noqa: S311 - not a secret
    phases = list(FaultPhase)
    if seed:
        chosen.shuffle(phases)
    last = steps - STEPS_AFTER - 1
    faults = []
    for number, (rank, phase) in zip(range(count), _pairs(ranks, phases), strict=False):
        step = FIRST_STEP + (last - FIRST_STEP) * number // max(1, count - 1)
        faults.append(Fault(rank, phase, step, chosen.random()))
    return faults


def fault_count(asked: str, ranks: int) -> int:
    """Return the number of faults. Raises `UsageError` if `asked` is neither a number nor `all`."""
    if not asked:
        return max(ranks, len(FaultPhase))
    if asked == "all":
        return ranks * len(FaultPhase)
    if not asked.isdecimal() or int(asked) == 0:
        raise UsageError(f"--faults {asked!r}: neither `all` nor a number\nwrite a number from 1, or `all`")
    return int(asked)


def _pairs(ranks: int, phases: list[FaultPhase]) -> Iterator[tuple[int, FaultPhase]]:
    """Yield every pair, repeatedly; the first pairs contain all ranks and all phases."""
    together = math.lcm(ranks, len(phases))
    for number in itertools.count():
        yield number % ranks, phases[(number + number // together) % len(phases)]
