"""The time from the command line to the first completed step of all ranks: deadpool-run and torchrun in turns.

    python tests/bench/startup.py [--ranks 4] [--rounds 7] [--quick]

The same tiny recipes/gpt/train.py runs under both launchers. The first run of each is not counted: it fills the file caches.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

from common import BenchError, Run, deadpool, header, result, table, torchrun


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--spares", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="2 rounds")
    args = parser.parse_args()
    args.rounds = 2 if args.quick else args.rounds
    return args


def startup_s(run: Run) -> float:
    with run:
        run.end(120)
        return run.startup_s()


def measure(args: argparse.Namespace, home: Path) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"deadpool-run": [], "torchrun": []}
    for turn in range(args.rounds + 1):
        ours = startup_s(deadpool(home / f"d{turn}", args.ranks, args.spares, "--steps", 3))
        theirs = startup_s(torchrun(home / f"t{turn}", args.ranks, "--steps", 3))
        if turn:
            times["deadpool-run"].append(ours)
            times["torchrun"].append(theirs)
    return times


def main() -> int:
    args = options()
    header("start-up to the first step of all ranks", vars(args))
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as home:
        try:
            times = measure(args, Path(home))
        except BenchError as error:
            print(f"startup: {error}", file=sys.stderr)
            return 1
    rows: list[list[object]] = [["start-up, s", "runs", "median", "least", "most"]]
    for name, values in times.items():
        rows.append([name, len(values), *(f"{value:.2f}" for value in (median(values), min(values), max(values)))])
    table(rows)
    ratio = median(times["deadpool-run"]) / median(times["torchrun"])
    print(f"deadpool-run / torchrun: {ratio:.2f}")
    result("startup", {"parameters": vars(args), "startup_s": times, "ratio": round(ratio, 3)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
