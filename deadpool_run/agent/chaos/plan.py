"""The faults of a rehearsal. Pure."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from deadpool_run.core.injection import KillHow
from deadpool_run.view.victims import Victims


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault that is injected once, or again and again."""

    victims: Victims
    hows: tuple[KillHow, ...] = (KillHow.SIGKILL,)
    """Each time one of them is drawn."""
    every_s: tuple[float, float] | None = None
    """The least and the most time from one to the next, drawn each time. The first also waits so long for a protected job."""
    at_step: int | None = None
    """The first waits until the rank, or any, has completed so many steps."""
    phase: str = ""
    """Each waits until a rank that may be hit is in this phase."""
    count: int | None = None
    """How many; None: until the job ends."""

    @property
    def times(self) -> int | None:
        """How often it is injected; None: until the job ends."""
        return 1 if self.every_s is None else self.count

    def words(self) -> str:
        """Return it in words."""
        parts = [f"kill {self.victims.words()} with {' or '.join(self.hows)}"]
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
    """What is drawn for one injection. It depends on the seed, the fault and its number alone, never on the time."""

    wait_s: float
    how: KillHow
    victim: random.Random


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """A rehearsal."""

    faults: tuple[PlannedFault, ...]
    seed: int

    def words(self) -> str:
        """Return it in words."""
        return "; ".join(fault.words() for fault in self.faults)

    def draws(self, number: int) -> Iterator[Draw]:
        """Yield what is drawn for each injection of the fault of this number."""
        fault = self.faults[number]
        done = 0
        while fault.times is None or done < fault.times:
            drawn = random.Random(f"{self.seed}:{number}:{done}")  # noqa: S311 - not for secrets
            wait_s = 0.0 if fault.every_s is None or (done == 0 and fault.at_step) else drawn.uniform(*fault.every_s)
            yield Draw(wait_s, drawn.choice(fault.hows), drawn)
            done += 1
