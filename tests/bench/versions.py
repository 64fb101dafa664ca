"""Several checkouts of this repository, compared on one machine: what a step costs, and how long a killed rank is missing.

    python tests/bench/versions.py DIR [DIR ...] [--turns 10] [--kills 10] [--ranks 2] [--spares 1]

The script is recipes/gpt of this checkout, in its size "tiny": steps of milliseconds, which show fixed costs at their worst. The jobs
of all checkouts, and one under torchrun, exist at the same time and take turns; in the turn of one, the workers of all others are stopped
(SIGSTOP). So other load on the machine affects all alike: compare the ratios. First they run steps, then each job loses a rank in
each of its turns. Environments need the packages that each checkout imports. Its path comes first in PYTHONPATH.
"""

import argparse
import random
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from common import BenchError, deadpool, header, kill_and_time, quantile, result, table, torchrun
from overhead import LOADS, Side, ratios
from recovery import await_calm

STEPS = 60
"""Steps in a turn."""
CALM_S = 0.3
"""The least time between the end of a recovery and the next kill: other processes of the job end their work."""


@dataclass
class Version:
    """The job of a checkout, or of torchrun."""

    name: str
    side: Side
    spares: int | None
    recoveries_s: list[float] = field(default_factory=list)

    def lose_rank(self, dice: random.Random) -> None:
        """Run until the job is calm, kill a rank, and note how long it was missing."""
        run = self.side.run
        since = run.completed()
        self.side.let_go()
        await_calm(run, self.spares, since)
        time.sleep(CALM_S + dice.uniform(0.0, CALM_S))  # the random time of the kill, not a wait
        recovery = kill_and_time(run, dice.randrange(run.ranks), 120)
        self.recoveries_s.append(recovery.total_s)
        await_calm(run, self.spares, recovery.step)
        self.side.stop()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="+", metavar="DIR")
    parser.add_argument("--turns", type=int, default=10, help=f"turns of {STEPS} steps")
    parser.add_argument("--kills", type=int, default=10, help="ranks that each job loses; the first is not counted")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for folder in args.checkouts:
        if not (folder / "deadpool_run").is_dir():
            parser.error(f"{folder} is no checkout of deadpool-run: it has no folder deadpool_run")
    return args


def start(args: argparse.Namespace, home: Path, stack: ExitStack) -> list[Version]:
    """Start all jobs, and stop their workers after the first steps."""
    script = LOADS["tiny"].script("ddp")
    found = [Version("torchrun", Side("torchrun", torchrun(home / "torchrun", args.ranks, *script)), None)]
    for number, folder in enumerate(args.checkouts):
        run = deadpool(home / f"job{number}", args.ranks, args.spares, *script)
        run.env |= {"PYTHONPATH": str(folder.resolve()), "DEADPOOL_HANG_TIMEOUT": "0", "PYTHONSAFEPATH": "1"}
        found.append(Version(str(folder), Side(str(folder), run), args.spares))
    for version in found:
        stack.enter_context(version.side.run)
        stack.callback(version.side.let_go)
        version.side.settle()
    return found


def measure(args: argparse.Namespace) -> list[Version]:
    dice = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as home, ExitStack() as stack:
        versions = start(args, Path(home), stack)
        for _ in range(args.turns):
            for version in versions:
                version.side.take(STEPS)
        for _ in range(args.kills):
            for version in versions[1:]:
                version.lose_rank(dice)
    return versions


def show(versions: list[Version]) -> dict[str, Any]:
    rows: list[list[object]] = [
        [
            "",
            "step ms",
            "CPU ms a step",
            "step / torchrun",
            "CPU / torchrun",
            "kill to first step, ms, p50",
            "quartiles",
        ]
    ]
    base, values = versions[0].side, {}
    for version in versions:
        side = version.side
        steps, cpu = median(ratios([medians(side), medians(base)])), median(ratios([side.cpu, base.cpu]))
        times = [1e3 * each for each in version.recoveries_s[1:] or version.recoveries_s]
        found = [1e3 * median(medians(side)), 1e3 * median(side.cpu), steps, cpu]
        shown = (
            [f"{median(times):.0f}", f"{quantile(times, 0.25):.0f}-{quantile(times, 0.75):.0f}"] if times else ["", ""]
        )
        rows.append([version.name, *(f"{each:.2f}" for each in found), *shown])
        values[version.name] = {"step_ratio": round(steps, 4), "cpu_ratio": round(cpu, 4), "recoveries_ms": times}
    table(rows)
    return values


def medians(side: Side) -> list[float]:
    """Return the median step of each turn, in seconds."""
    return [median(turn) for turn in side.turns]


def main() -> int:
    args = options()
    header("versions", vars(args))
    try:
        values = show(measure(args))
    except BenchError as error:
        print(f"versions: {error}", file=sys.stderr)
        return 1
    args.checkouts = [*map(str, args.checkouts)]
    result("versions", {"parameters": vars(args), "results": values})
    return 0


if __name__ == "__main__":
    sys.exit(main())
