"""The cost of protection without failures: step times and start-up, compared with torchrun and plain Gloo.

    python tests/bench/overhead.py [--quick]

The same recipes/gpt/train.py runs under both launchers. Under torchrun, `init()` makes plain groups and takes no snapshots.
Under deadpool-run, every step is captured. Both jobs exist at the same time and take turns of a few steps, A B A B ...: the
workers of one are stopped (SIGSTOP) while the other's run. So other load on the machine affects both. The first step of a
turn is left out, since the pause interrupts it. The time of a capture after a step is part of the next step. On a shared
machine, step times differ by 10 % and more, so one run gives the ratio of step times to within 1-2 %. The benchmark also
prints the CPU time of all processes and threads of a launcher, per step and rank. It varies less, and is an upper bound
for the cost of protection if cores are not idle. Three loads:

* heavy: 3.3 M parameters and 32 sequences of 128 bytes per rank, which is a step of a second or more on one core. A snapshot
  copies 12 bytes per parameter (weights and both moments). A step computes 6 floating-point operations per parameter and
  token. With 4,096 tokens per rank and step, the minimum of a training step on an accelerator, the copy is a fraction of a
  percent of the computation.
* tiny: 0.1 M parameters and 128 tokens, which is a step of milliseconds. It shows the fixed cost of a step at its worst.
* images: a small convolution on 64 images of 224 x 224 pixels, 37 MiB. It shows whether data of the batch costs anything.
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
from common import GPT, BenchError, Run, deadpool, header, quantile, result, table, torchrun

LAUNCHERS = ("deadpool-run", "torchrun")
SETTLE_STEPS = 4
"""The first steps, which are left out: buckets are rebuilt, optimizers make state, the transcript is recorded."""
FOREVER = 10**6
BOUND_S = 600.0


@dataclass(frozen=True)
class Load:
    """One size of recipes/gpt, or another script."""

    size: str
    batch: int
    steps: int
    """Steps per turn."""
    turns: int
    """Turns of a launcher per round. Each round starts both jobs again."""
    path: Path = GPT

    def script(self, parallel: str) -> tuple[object, ...]:
        """Return the arguments of the script."""
        sized = ("--parallel", parallel, "--size", self.size) if self.path == GPT else ()
        return (*sized, "--batch", self.batch, "--steps", FOREVER)


LOADS = {
    "heavy": Load("small", 32, 5, 8),
    "tiny": Load("tiny", 4, 100, 8),
    "images": Load("images", 64, 20, 8, Path(__file__).resolve().parent / "images_train.py"),
}


class Side:
    """The job of one launcher. It runs only in its turns."""

    def __init__(self, name: str, run: Run) -> None:
        self.name = name
        self.run = run
        self.turns: list[list[float]] = []
        """For each turn, the step times of the slowest rank, in seconds."""
        self.cpu: list[float] = []
        """For each turn, the CPU time of all the launcher's processes, in seconds per step and rank."""
        self.capture_interval: int | None = None

    def settle(self) -> None:
        """Run the first steps, which differ from later ones, and pause."""
        self.run.wait("the first steps", lambda: self.run.completed() >= SETTLE_STEPS, BOUND_S)
        self.stop()

    def take(self, steps: int) -> None:
        """Run for `steps` more steps."""
        before = self.run.completed()
        cpu_before, steps_before = self._cpu_s(), self._stamps()
        began_ns = time.monotonic_ns()
        self._signal(signal.SIGCONT)
        # Poll seldom, and in the same way for both launchers, so that polling costs both the same.
        self.run.wait("the end of a turn", lambda: self.run.completed() >= before + steps, BOUND_S, poll_s=0.02)
        self.stop()
        cpu_s = self._cpu_s() - cpu_before
        self.cpu.append(cpu_s / (self._stamps() - steps_before))
        periods = []
        for log in self.run.logs:
            stamps = [stamp.ns for stamp in log.stamps if stamp.ns > began_ns]
            periods.append([(after - before) / 1e9 for before, after in pairwise(stamps)])
        self.turns.append(max(periods, key=median))

    def let_go(self) -> None:
        """Continue the workers, so that the job can be ended."""
        self._signal(signal.SIGCONT)

    def _stamps(self) -> int:
        """Return the number of completed steps, summed over the ranks."""
        return sum(len(log.read()) for log in self.run.logs)

    def _cpu_s(self) -> float:
        """Return the CPU time so far of the launcher and its descendants."""
        launcher = psutil.Process(self.run.process.pid)
        times = [each.cpu_times() for each in (launcher, *launcher.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def stop(self) -> None:
        """Stop the workers."""
        self._signal(signal.SIGSTOP)

    def _signal(self, number: int) -> None:
        for rank, log in enumerate(self.run.logs):
            if log.read():
                os.kill(self.run.pid(rank), number)


@dataclass(frozen=True)
class Round:
    """The results of one launcher in a round. Times are in seconds."""

    turns: list[list[float]]
    cpu: list[float]
    """For each turn, the CPU time per step and rank."""
    startup_s: float
    """The time from the launcher's start to the first completed step of all ranks."""
    capture_interval: int | None
    """Steps between snapshots at the end. More than 1 if the machine could not keep up with every step."""

    @property
    def steps(self) -> list[float]:
        """All step times."""
        return [period for turn in self.turns for period in turn]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3, help="rounds per size; each starts both launchers again")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--load", choices=sorted(LOADS), action="append", help="default: all")
    parser.add_argument("--quick", action="store_true", help="1 round")
    args = parser.parse_args()
    args.rounds = 1 if args.quick else args.rounds
    return args


def measure(args: argparse.Namespace, load: Load, home: Path) -> dict[str, list[Round]]:
    script = load.script(args.parallel)
    rounds: dict[str, list[Round]] = {name: [] for name in LAUNCHERS}
    for number in range(args.rounds):
        sides = [
            Side("deadpool-run", deadpool(home / f"d{number}", args.ranks, args.spares, *script, path=load.path)),
            Side("torchrun", torchrun(home / f"t{number}", args.ranks, *script, path=load.path)),
        ]
        sides[0].run.env["DEADPOOL_HANG_TIMEOUT"] = "0"
        for side in play(sides[:: 1 if number % 2 == 0 else -1], load):
            rounds[side.name].append(Round(side.turns, side.cpu, side.run.startup_s(), side.capture_interval))
    return rounds


def play(sides: Sequence[Side], load: Load) -> list[Side]:
    """Run all turns of both sides. Return the sides while their jobs still exist."""
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
        f"ratios of single turns: step {spread(pairs)}, CPU time {spread(cpu)}\n",
        flush=True,
    )
    return {
        "load": asdict(load) | {"path": load.path.name},
        "rounds": {launcher: [asdict(each) for each in found] for launcher, found in rounds.items()},
        "step_ratio": round(ours / theirs, 4),
        "step_ratio_of_turns": round(median(pairs), 4),
        "cpu_ratio_of_turns": round(median(cpu), 4),
        "step_difference_s": round(ours - theirs, 6),
        "startup_ratio": round(startup, 3),
    }


def ratios(sides: Iterable[list[float]]) -> list[float]:
    """Return the ratio deadpool-run / torchrun of each turn."""
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
