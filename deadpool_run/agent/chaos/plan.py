"""The faults of a chaos run. Pure."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from deadpool_run.agent.chaos.victims import Victims
from deadpool_run.core.injection import KillHow, Slowness


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault that is injected once or repeatedly."""

    victims: Victims
    hows: tuple[KillHow | Slowness, ...] = (KillHow.SIGKILL,)
    """One of them is drawn for each injection."""
    every_s: tuple[float, float] | None = None
    """Shortest and longest time between two injections; each time is drawn. The first injection counts from a protected job."""
    at_step: int | None = None
    """The first injection waits until the rank, or any rank, has completed this many steps."""
    phase: str = ""
    """Each injection waits until a rank that it may hit is in this phase; empty: any phase."""
    count: int | None = None
    """The number of injections; None: until the job ends."""

    @property
    def times(self) -> int | None:
        """The number of injections, 1 without `every_s`; None: until the job ends."""
        return 1 if self.every_s is None else self.count

    def description(self) -> str:
        """Return the fault as text for messages."""
        parts = [f"kill {self.victims.description()} with {' or '.join(map(str, self.hows))}"]
        if self.at_step is not None:
            parts.append(f"at step {self.at_step}")
        if self.phase:
            parts.append(f"in phase {self.phase}")
        if self.every_s is not None:
            least, most = self.every_s
            parts.append(f"every {least:g} s" if least == most else f"every {least:g} to {most:g} s")
        if self.count is not None:
            parts.append(f"{self.count} times" if self.count > 1 else "once")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Draw:
    """The random choices of one injection. They depend only on the seed, the fault and the injection's number, not on time."""

    wait_s: float
    how: KillHow | Slowness
    victim: random.Random


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The faults of a chaos run, and the seed of its random choices."""

    faults: tuple[PlannedFault, ...]
    seed: int

    def description(self) -> str:
        """Return the faults as text for messages."""
        return "; ".join(fault.description() for fault in self.faults)

    def draws(self, number: int) -> Iterator[Draw]:
        """Yield the random choices of each injection of the fault with this number."""
        fault = self.faults[number]
        done = 0
        while fault.times is None or done < fault.times:
            drawn = random.Random(f"{self.seed}:{number}:{done}")  # noqa: S311 - not for secrets
            wait_s = 0.0 if fault.every_s is None or (done == 0 and fault.at_step) else drawn.uniform(*fault.every_s)
            yield Draw(wait_s, drawn.choice(fault.hows), drawn)
            done += 1
