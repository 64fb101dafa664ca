"""The cost of replacing a rank with a large state: DDP, two ranks, one spare. Its phases are compared with a copy of the state.

    python tests/bench/big_state.py [--mib 64 512 1024] [--kills 5] [--mode warm]

Each kill is SIGKILL from outside. `swap` is the launcher's measurement, from the loss to the first step that all ranks
completed. That step is the script's work, so `without step` leaves it out. `copy` is the time of one thread to copy a rank's
state into memory that was written before. It is measured before each kill, while the ranks train. The ratio is
`without step` / `copy`. The second table shows the parts of the rehearsal, as the script sees them.
"""

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from common import BenchError, Run, header, kill_and_time, result, table
from recovery import incident_after
from spares import ready_spare

SCRIPT = Path(__file__).resolve().parent / "big_state_train.py"
PHASES = ("promoted", "aborted", "rehearsed", "restored", "attached", "first_step")


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[64, 512, 1024], help="state per rank, in MiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=5, help="for each size")
    parser.add_argument("--mode", choices=("warm", "hot"), default="warm", help="of the spare")
    return parser.parse_args()


def launch(home: Path, args: argparse.Namespace, mib: int) -> Run:
    words = (
        "--no-config",
        "--run-dir",
        home / "run",
        "--nproc-per-node",
        args.ranks,
        "--spares",
        1,
        "--spare-mode",
        args.mode,
    )
    command = [sys.executable, "-m", "deadpool_run", *words, SCRIPT, "--step-log", home / "steps", "--mib", mib]
    return Run(home, args.ranks, [*map(str, command)])


def copy_s(mib: int) -> float:
    """Return the time to copy `mib` MiB, from and into memory that was written before."""
    source, target = bytearray(b"\1") * (mib << 20), bytearray(b"\2") * (mib << 20)
    began = time.perf_counter()
    memoryview(target)[:] = source
    return time.perf_counter() - began


def rehearsal(path: Path, known: int) -> dict[str, tuple[float, float]]:
    """Return the time and CPU time, in seconds, of each part of the rehearsal that starts at line `known`."""
    marks = [line.split(",") for line in path.read_text().splitlines()[known:]]
    ends = [(int(wall), int(cpu)) for _, wall, cpu in marks]
    return {
        name: ((end[0] - start[0]) / 1e9, (end[1] - start[1]) / 1e9)
        for (name, _, _), start, end in zip(marks[1:], ends, ends[1:], strict=False)
    }


def phases_of(incident: dict[str, Any]) -> dict[str, float]:
    """Return the time of each phase, in seconds, and the sum of all."""
    ends = [incident[f"{name}_s"] for name in PHASES]
    found = {name: end - max([0.0, *ends[:i]]) for i, (name, end) in enumerate(zip(PHASES, ends, strict=True))}
    total = max(ends)
    return {**found, "swap": total, "without step": total - found["first_step"]}


def has_completed(run: Run, steps: int) -> bool:
    return run.completed() >= steps


def measure(
    home: Path, args: argparse.Namespace, mib: int
) -> tuple[list[dict[str, float]], list[dict[str, tuple[float, float]]]]:
    swaps: list[dict[str, float]] = []
    parts: list[dict[str, tuple[float, float]]] = []
    hot, epoch = args.mode == "hot", 0
    with launch(home, args, mib) as run:
        run.wait("the first steps", lambda: run.completed() >= 4, 240)
        for number in range(args.kills):
            calm = run.completed() + 3
            spare = run.wait("a spare was ready", ready_spare(run, hot), 240)
            run.wait("three more steps", partial(has_completed, run, calm), 240)
            rank = spare["prepared"] if hot else number % args.ranks
            marks = home / "steps" / f"rehearsal{rank}"
            known = 0 if hot else len(marks.read_text().splitlines())
            copied = copy_s(mib)
            from_outside = kill_and_time(run, rank, 240).total_s
            incident = incident_after(run, epoch)
            epoch = incident["epoch"]
            swaps.append({**phases_of(incident), "from outside": from_outside, "copy": copied})
            if not hot:
                parts.append(rehearsal(marks, known))
    return swaps, parts


def middle(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(median(each[name] for each in found), 4) for name in found[0]}


def middle_pairs(found: list[dict[str, tuple[float, float]]]) -> dict[str, list[float]]:
    """Return the median wall time and CPU time of each part. Empty without a rehearsal."""
    names = found[0] if found else {}
    return {name: [round(median(each[name][k] for each in found), 4) for k in range(2)] for name in names}


def main() -> int:
    args = options()
    header("big states", vars(args))
    values: dict[str, Any] = {}
    rows: list[list[object]] = []
    part_rows: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as home:
        for mib in args.mib:
            try:
                swaps, parts = measure(Path(home) / str(mib), args, mib)
            except BenchError as error:
                print(f"big states: {mib} MiB: {error}", file=sys.stderr)
                return 1
            swap, rehearsed = middle(swaps), middle_pairs(parts)
            ratio = median(each["without step"] / each["copy"] for each in swaps)
            rows = rows or [["a rank's state, ms (p50)", *swap, "ratio"]]
            rows.append([f"{mib} MiB", *(f"{1e3 * each:.0f}" for each in swap.values()), f"{ratio:.1f}"])
            if rehearsed:
                part_rows = part_rows or [["its rehearsal, ms (CPU ms), p50", *rehearsed]]
                part_rows.append(
                    [f"{mib} MiB", *(f"{1e3 * wall:.0f} ({1e3 * cpu:.0f})" for wall, cpu in rehearsed.values())]
                )
            values[str(mib)] = {"swap_s": swap, "rehearsal_s": rehearsed, "ratio": round(ratio, 2)}
    table(rows)
    if part_rows:
        table(part_rows)
    result("big states", {"parameters": vars(args), "results": values})
    return 0


if __name__ == "__main__":
    sys.exit(main())
