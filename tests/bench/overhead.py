"""What protection costs while nothing fails: step times and start-up, beside torchrun with plain Gloo.

    python tests/bench/overhead.py [--quick]

The same recipes/gpt/train.py runs under both launchers; under torchrun `init()` gives plain groups and takes no snapshot,
under deadpool-run every step is captured. Both jobs are alive at once and take turns of a few steps, A B A B ...: the
workers of the one are stopped (SIGSTOP) while the other's run. So both meet the same machine, whatever else it does. Of a
turn the time up to its first step's end is left out, since it is cut by the pause; what is captured behind a step is in the
time of the next one. On a machine that is shared with others the times of steps still differ by a tenth and more, so a single
run tells the ratio of step times to a percent or two. The CPU time of everything that a launcher started (agent, ranks,
spares; all threads) per step and rank is told beside it. It swings less, and bounds what protection can cost where cores are
not idle. Two sizes:

* heavy: 3.3 M parameters, 32 sequences of 128 bytes a rank: a step of a second or more on one core. A snapshot copies
  12 bytes a parameter (weights and both moments); a step computes 6 floating-point operations a parameter and token.
  With 4,096 tokens a rank and step, the number that a training step on an accelerator has at the least, the copy is a
  fraction of a percent of the computing: what is left of it is the overhead.
* tiny: 0.1 M parameters and 128 tokens: a step of milliseconds, in which the fixed cost of a step is seen at its worst.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from common import BenchError, Run, deadpool, header, quantile, result, table, torchrun

LAUNCHERS = ("deadpool-run", "torchrun")
SETTLE_STEPS = 4
"""Steps at the start that are left out: buckets are rebuilt, the optimizer makes its state, the transcript is taken."""
FOREVER = 10**6
BOUND_S = 600.0


@dataclass(frozen=True)
class Load:
    """One size of recipes/gpt."""

    size: str
    batch: int
    steps: int
    """Of a turn."""
    turns: int
    """Of a launcher in a round, in which both jobs are started anew."""


LOADS = {"heavy": Load("small", 32, 5, 8), "tiny": Load("tiny", 4, 100, 8)}


class Side:
    """One launcher's job, which runs in its turns alone."""

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run
        self.turns: list[list[float]] = []
        """Of each turn the times from step to step of its slowest rank, in seconds."""
        self.cpu: list[float] = []
        """Of each turn the CPU time of all the launcher's processes, in seconds a step and rank."""
        self.capture_interval: int | None = None

    def settle(self) -> None:
        """Run until all is as it stays."""
        self.run.wait("the first steps", lambda: self.run.completed() >= SETTLE_STEPS, BOUND_S)
        self._signal(signal.SIGSTOP)

    def take(self, steps: int) -> None:
        """Run for so many steps more."""
        before = self.run.completed()
        cpu_before, steps_before = self._cpu_s(), self._stamps()
        began_ns = time.monotonic_ns()
        self._signal(signal.SIGCONT)
        # Looked at seldom, and under both launchers, so that looking costs neither more than the other.
        self.run.wait("the end of a turn", lambda: self.run.completed() >= before + steps, BOUND_S, poll_s=0.02)
        self._signal(signal.SIGSTOP)
        cpu_s = self._cpu_s() - cpu_before
        self.cpu.append(cpu_s / (self._stamps() - steps_before))
        periods = []
        for log in self.run.logs:
            stamps = [stamp.ns for stamp in log.stamps if stamp.ns > began_ns]
            periods.append([(after - before) / 1e9 for before, after in pairwise(stamps)])
        self.turns.append(max(periods, key=median))

    def let_go(self) -> None:
        """Let it be ended."""
        self._signal(signal.SIGCONT)

    def _stamps(self) -> int:
        """Return how many steps the ranks have completed, all together."""
        return sum(len(log.read()) for log in self.run.logs)

    def _cpu_s(self) -> float:
        """Return the CPU time so far of the launcher and all below it."""
        launcher = psutil.Process(self.run.process.pid)
        times = [each.cpu_times() for each in (launcher, *launcher.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def _signal(self, number: int) -> None:
        for rank, log in enumerate(self.run.logs):
            if log.read():
                os.kill(self.run.pid(rank), number)


@dataclass(frozen=True)
class Round:
    """What a round found of one launcher; times in seconds."""

    turns: list[list[float]]
    cpu: list[float]
    """Of each turn, for a step and rank."""
    startup_s: float
    """From the launcher's start to the first completed step of all ranks."""
    capture_interval: int | None
    """Steps between snapshots in the end; more than 1 if this machine could not keep up with every step."""

    @property
    def steps(self) -> list[float]:
        """All times from step to step."""
        return [period for turn in self.turns for period in turn]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each launcher and size")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--load", choices=sorted(LOADS), action="append", help="default: both")
    parser.add_argument("--quick", action="store_true", help="1 round")
    args = parser.parse_args()
    args.rounds = 1 if args.quick else args.rounds
    return args


def measure(args: argparse.Namespace, load: Load, home: Path) -> dict[str, list[Round]]:
    script = ("--parallel", args.parallel, "--size", load.size, "--batch", load.batch, "--steps", FOREVER)
    rounds: dict[str, list[Round]] = {name: [] for name in LAUNCHERS}
    for number in range(args.rounds):
        sides = [
            Side("deadpool-run", deadpool(home / f"d{number}", args.ranks, args.spares, *script)),
            Side("torchrun", torchrun(home / f"t{number}", args.ranks, *script)),
        ]
        sides[0].run.env["DEADPOOL_HANG_TIMEOUT"] = "0"
        for side in play(sides[:: 1 if number % 2 == 0 else -1], load):
            rounds[side.name].append(Round(side.turns, side.cpu, side.run.startup_s(), side.capture_interval))
    return rounds


def play(sides: Sequence[Side], load: Load) -> list[Side]:
    """Have the sides take their turns; return them when all is over but their ends."""
    with ExitStack() as stack:
        for side in sides:
            stack.enter_context(side.run)
            stack.callback(side.let_go)
            side.settle()
        for _ in range(load.turns):
            for side in sides:
                side.take(load.steps)
        for side in sides:
            if side.name == "deadpool-run":
                side.capture_interval = side.run.status()["capture_interval"]
    return list(sides)


def show(name: str, load: Load, rounds: dict[str, list[Round]]) -> dict[str, Any]:
    rows: list[list[object]] = [
        [
            f"{name}: {load.size}, batch {load.batch}",
            "steps",
            "step ms",
            "quartiles",
            "p95 ms",
            "start-up s",
            "snapshot each",
        ]
    ]
    steps, starts = {}, {}
    for launcher, found in rounds.items():
        times = steps[launcher] = [period for each in found for period in each.steps]
        starts[launcher] = median(each.startup_s for each in found)
        interval = {None: "-", 1: "step"}.get(found[-1].capture_interval, f"{found[-1].capture_interval} steps")
        quartiles = f"{1e3 * quantile(times, 0.25):.2f}-{1e3 * quantile(times, 0.75):.2f}"
        rank_entries = [f"{1e3 * median(times):.2f}", quartiles, f"{1e3 * quantile(times, 0.95):.2f}"]
        rows.append([launcher, len(times), *rank_entries, f"{starts[launcher]:.2f}", interval])
    ours, theirs = (median(steps[launcher]) for launcher in LAUNCHERS)
    pairs = ratios([median(turn) for each in rounds[launcher] for turn in each.turns] for launcher in LAUNCHERS)
    cpu = ratios([turn for each in rounds[launcher] for turn in each.cpu] for launcher in LAUNCHERS)
    startup = starts["deadpool-run"] / starts["torchrun"]
    table(rows)
    print(
        f"deadpool-run / torchrun: step {ours / theirs:.4f} ({1e3 * (ours - theirs):+.2f} ms), start-up {startup:.2f}\n"
        f"the turns' own ratios: step {spread(pairs)}, CPU time {spread(cpu)}\n",
        flush=True,
    )
    return {
        "load": asdict(load),
        "rounds": {launcher: [asdict(each) for each in found] for launcher, found in rounds.items()},
        "step_ratio": round(ours / theirs, 4),
        "step_ratio_of_turns": round(median(pairs), 4),
        "cpu_ratio_of_turns": round(median(cpu), 4),
        "step_difference_s": round(ours - theirs, 6),
        "startup_ratio": round(startup, 3),
    }


def ratios(sides: Iterable[list[float]]) -> list[float]:
    """Return ours by theirs, turn by turn."""
    return [one / other for one, other in zip(*sides, strict=True)]


def spread(values: list[float]) -> str:
    return f"{median(values):.4f} ({quantile(values, 0.25):.4f}-{quantile(values, 0.75):.4f})"


def main() -> int:
    args = options()
    header("overhead", vars(args))
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as home:
        for name in args.load or LOADS:
            try:
                values[name] = show(name, LOADS[name], measure(args, LOADS[name], Path(home) / name))
            except BenchError as error:
                print(f"overhead: {error}", file=sys.stderr)
                return 1
    result("overhead", {"parameters": vars(args), "results": values})
    return 0


if __name__ == "__main__":
    sys.exit(main())
