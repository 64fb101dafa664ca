"""The gain from `--preload` and `--spare-mode hot`: the interruption of training when a rank is killed.

    python tests/bench/spares.py [--ranks 2] [--kills 10] [--quick]

Each kill is SIGKILL from outside. The measured time ends when every rank has completed the first step with the replacement.
With a hot spare, the benchmark kills the rank that it has rehearsed, and then another one.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common import BenchError, Run, header, kill_and_time, result, table

SCRIPT = Path(__file__).resolve().parent / "spare_train.py"
SCRIPTS = {
    "plain": (),
    "set-up of 1 s": ("--set-up-s", "1"),
    "imports 1 module": ("--imports",),
    "torch.compile": ("--compile",),
}
PRELOAD = ("--preload", "torch._inductor.compile_fx")
MODES: dict[str, tuple[str, ...]] = {
    "warm": (),
    "warm, --preload": PRELOAD,
    "hot": ("--spare-mode", "hot", *PRELOAD),
    "hot, for another rank": ("--spare-mode", "hot", *PRELOAD),
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--quick", action="store_true", help="3 kills of each kind")
    args = parser.parse_args()
    if args.quick:
        args.kills = 3
    return args


def launch(home: Path, ranks: int, mode: tuple[str, ...], script: tuple[str, ...]) -> Run:
    words = ("--no-config", "--run-dir", home / "run", "--nproc-per-node", ranks, "--spares", 1, *mode)
    command = [sys.executable, "-m", "deadpool_run", *words, SCRIPT, "--step-log", home / "steps", *script]
    return Run(home, ranks, [*map(str, command)], {"TORCHINDUCTOR_CACHE_DIR": str(home.parent / "inductor")})


def ready_spare(run: Run, hot: bool) -> Callable[[], dict[str, Any] | None]:
    """Return a function that looks for a ready spare. If `hot`, it must have rehearsed."""

    def look() -> dict[str, Any] | None:
        status = run.status()
        if status["phase"] != "running":
            return None
        found = [s for s in status["spares"] if s["phase"] == "ready" and (not hot or s["prepared"] is not None)]
        return dict(found[0]) if found else None

    return look


def measure(home: Path, args: argparse.Namespace, name: str, script: tuple[str, ...]) -> list[float]:
    """Return the seconds of each kill."""
    hot = name.startswith("hot")
    times: list[float] = []
    with launch(home, args.ranks, MODES[name], script) as run:
        run.wait("the first steps", lambda: run.completed() >= 3, 240)
        for _ in range(args.kills):
            since = run.completed()
            spare = run.wait("a spare was ready", ready_spare(run, hot), 120)
            run.wait("five more steps", lambda since=since: run.completed() >= since + 5, 120)
            rank = spare["prepared"] if hot else len(times) % args.ranks
            rank = (rank + 1) % args.ranks if "another" in name else rank
            times.append(kill_and_time(run, rank, 240).total_s)
    return times


def main() -> int:
    args = options()
    header("spares", vars(args))
    rows: list[list[object]] = [["kill to first step, p50 in ms", *MODES]]
    values: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as home:
        for kind, script in SCRIPTS.items():
            values[kind] = {}
            for number, name in enumerate(MODES):
                try:
                    found = measure(Path(home) / f"{len(rows)}-{number}", args, name, script)
                except BenchError as error:
                    print(f"spares: {kind}, {name}: {error}", file=sys.stderr)
                    return 1
                values[kind][name] = [round(each, 4) for each in found]
            rows.append([kind, *(f"{1e3 * median(each):.0f}" for each in values[kind].values())])
    table(rows)
    result("spares", {"parameters": vars(args), "results": values})
    return 0


if __name__ == "__main__":
    sys.exit(main())
