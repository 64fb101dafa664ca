"""What protection costs while nothing fails: step times and start-up, beside torchrun with plain Gloo.

    python tests/bench/overhead.py [--quick]

The same recipes/gpt/train.py runs under both launchers in turn, A B A B ...; under torchrun `init()` gives plain
groups and takes no snapshot, under deadpool-run every step is captured. Two sizes:

* heavy: 3.3 M parameters, 32 sequences of 128 bytes a rank: a step of a second or more on one core. A snapshot copies
  12 bytes a parameter (weights and both moments); a step computes 6 floating-point operations a parameter and token.
  With 4,096 tokens a rank and step, the number that a training step on an accelerator has at the least, the copy is a
  fraction of a percent of the computing: what is left of it is the overhead.
* tiny: 0.1 M parameters and 128 tokens: a step of milliseconds, in which the fixed cost of a step is seen at its worst.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from common import BenchError, Run, deadpool, header, quantile, result, table, torchrun

LAUNCHERS = ("deadpool-run", "torchrun")
SETTLE_STEPS = 3
"""Steps at the start that are left out: buckets are rebuilt, the optimizer makes its state, the transcript is taken."""


@dataclass(frozen=True)
class Load:
    """One size of recipes/gpt."""

    size: str
    batch: int
    steps: int


LOADS = {"heavy": Load("small", 32, 15), "tiny": Load("tiny", 4, 400)}


@dataclass(frozen=True)
class Sample:
    """One run."""

    step_s: float
    """Median time from step to step of the slowest rank."""
    p95_s: float
    startup_s: float
    """From the launcher's start to the first completed step of all ranks."""
    capture_interval: int | None
    """Steps between snapshots half-way; more than 1 if this machine could not keep up with every step."""


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each launcher and size")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--load", choices=sorted(LOADS), action="append", help="default: both")
    parser.add_argument("--quick", action="store_true", help="2 rounds")
    args = parser.parse_args()
    args.rounds = 2 if args.quick else args.rounds
    return args


def sample(run: Run, steps: int, *, ours: bool) -> Sample:
    with run:
        # Looked at seldom, and under both launchers, so that looking costs neither more than the other.
        run.wait("half of the steps", lambda: run.completed() >= steps // 2, 600, poll_s=0.1)
        interval = run.status()["capture_interval"] if ours else None
        run.end(600)
        periods = []
        for log in run.logs:
            stamps = [stamp.ns for stamp in log.read()][SETTLE_STEPS:]
            periods.append([(after - before) / 1e9 for before, after in pairwise(stamps)])
        return Sample(
            max(map(median, periods)), max(quantile(times, 0.95) for times in periods), run.startup_s(), interval
        )


def measure(args: argparse.Namespace, load: Load, home: Path) -> dict[str, list[Sample]]:
    script = ("--parallel", args.parallel, "--size", load.size, "--batch", load.batch, "--steps", load.steps)
    samples: dict[str, list[Sample]] = {name: [] for name in LAUNCHERS}
    for turn in range(args.rounds):
        samples["deadpool-run"].append(
            sample(deadpool(home / f"d{turn}", args.ranks, args.spares, *script), load.steps, ours=True)
        )
        samples["torchrun"].append(sample(torchrun(home / f"t{turn}", args.ranks, *script), load.steps, ours=False))
    return samples


def show(name: str, load: Load, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    rows: list[list[object]] = [
        [f"{name}: {load}", "runs", "step ms", "of runs", "p95 ms", "start-up s", "of runs", "snapshot each"]
    ]
    middle: dict[str, Sample] = {}
    for launcher, runs in samples.items():
        steps, starts = [run.step_s for run in runs], [run.startup_s for run in runs]
        middle[launcher] = Sample(
            median(steps), median(run.p95_s for run in runs), median(starts), runs[-1].capture_interval
        )
        spread = f"{1e3 * min(steps):.2f}-{1e3 * max(steps):.2f}"
        one = middle[launcher]
        interval = {None: "-", 1: "step"}.get(one.capture_interval, f"{one.capture_interval} steps")
        cells = [f"{1e3 * one.step_s:.2f}", spread, f"{1e3 * one.p95_s:.2f}", f"{one.startup_s:.2f}"]
        rows.append([launcher, len(runs), *cells, f"{min(starts):.2f}-{max(starts):.2f}", interval])
    ours, theirs = (middle[launcher] for launcher in LAUNCHERS)
    pairs = [one.step_s / other.step_s for one, other in zip(*(samples[name] for name in LAUNCHERS), strict=True)]
    table(rows)
    print(
        f"deadpool-run / torchrun: step {ours.step_s / theirs.step_s:.4f}"
        f" ({1e3 * (ours.step_s - theirs.step_s):+.2f} ms; median of the rounds' own ratios {median(pairs):.4f}),"
        f" start-up {ours.startup_s / theirs.startup_s:.2f}\n",
        flush=True,
    )
    return {
        "load": asdict(load),
        "runs": {launcher: [asdict(run) for run in runs] for launcher, runs in samples.items()},
        "step_ratio": round(ours.step_s / theirs.step_s, 4),
        "step_ratio_of_rounds": [round(pair, 4) for pair in pairs],
        "step_difference_s": round(ours.step_s - theirs.step_s, 6),
        "startup_ratio": round(ours.startup_s / theirs.startup_s, 3),
    }


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
