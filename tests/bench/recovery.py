"""The interruption of training when a rank is killed: deadpool-run with a spare, without one, and torchrun.

    python tests/bench/recovery.py [--ranks 2] [--kills 20] [--quick]

Each kill is SIGKILL of a random rank, rank 0 included, at a random moment. The measured time starts just before the signal
and ends with the first step that every rank has completed with the replacement. torchrun's script writes a checkpoint
after every step. deadpool-run takes a snapshot of every step.
"""

import argparse
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from common import (
    BASELINE,
    BenchError,
    Recovery,
    Run,
    deadpool,
    header,
    kill_and_time,
    quantile,
    result,
    table,
    torchrun,
)

PHASES = ("aborted_s", "promoted_s", "rehearsed_s", "restored_s", "attached_s", "first_step_s")
FOREVER = 10**6


@dataclass(frozen=True)
class Kill:
    """One kill, timed from outside, and the launcher's report of it (empty for torchrun)."""

    recovery: Recovery
    incident: dict[str, Any]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=20, help="kills under deadpool-run, with a spare and without")
    parser.add_argument("--torchrun-kills", type=int, default=4, help="kills under torchrun; 0 leaves it out")
    parser.add_argument(
        "--parallel", choices=("ddp", "fsdp2"), default="ddp", help="only for deadpool-run; torchrun always runs ddp"
    )
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="5 kills, 1 under torchrun")
    args = parser.parse_args()
    if args.quick:
        args.kills, args.torchrun_kills = 5, min(1, args.torchrun_kills)
    return args


def await_calm(run: Run, spares: int | None, since: int) -> None:
    """Wait until every rank has completed five more steps and the spares are ready. `spares` is None under torchrun."""
    run.wait("five more steps", lambda: run.completed() >= since + 5, 60)
    if spares is not None:
        run.wait("the spares were ready", lambda: healed(run.status(), spares), 60)


def healed(status: dict[str, Any], spares: int) -> bool:
    ready = sum(spare["phase"] == "ready" for spare in status["spares"])
    return bool(status["phase"] == "running") and ready >= spares


def kill_often(run: Run, kills: int, spares: int | None, dice: random.Random) -> list[Kill]:
    found: list[Kill] = []
    for _ in range(kills):
        await_calm(run, spares, found[-1].recovery.step if found else 0)
        time.sleep(dice.uniform(0.0, 0.3))  # the random time of the kill, not a wait
        recovery = kill_and_time(run, dice.randrange(run.ranks), 120)
        told = found[-1].incident.get("epoch", 0) if found else 0
        found.append(Kill(recovery, incident_after(run, told) if spares is not None else {}))
    return found


def incident_after(run: Run, epoch: int) -> dict[str, Any]:
    """Return the launcher's report of the repair after this epoch."""

    def newer() -> list[dict[str, Any]]:
        return [incident for incident in run.status()["incidents"] if incident["epoch"] > epoch]

    return dict(run.wait("the repair was reported", newer, 30)[-1])


def measure(args: argparse.Namespace, home: Path) -> dict[str, list[Kill]]:
    script = ("--size", args.size, "--steps", FOREVER)
    found: dict[str, list[Kill]] = {}
    for name, spares in (("spare", 1), ("no spare", 0)):
        with deadpool(home / name, args.ranks, spares, *script, "--parallel", args.parallel) as run:
            found[name] = kill_often(run, args.kills, spares, random.Random(args.seed))
    if args.torchrun_kills:
        run = torchrun(home / "torchrun", args.ranks, *script, path=BASELINE, max_restarts=args.torchrun_kills)
        with run:
            found["torchrun"] = kill_often(run, args.torchrun_kills, None, random.Random(args.seed))
    return found


def show(found: dict[str, list[Kill]]) -> dict[str, Any]:
    rows: list[list[object]] = [
        ["kill to first step, ms", "kills", "p50", "p95", "max", "survivors kept", "steps repeated"]
    ]
    values: dict[str, Any] = {}
    for name, kills in found.items():
        times = [kill.recovery.total_s for kill in kills]
        kept = sum(kill.recovery.survivors_kept for kill in kills)
        repeated = max(kill.recovery.steps_repeated for kill in kills)
        rank_entries = [milliseconds(value) for value in (median(times), quantile(times, 0.95), max(times))]
        rows.append([name, len(kills), *rank_entries, f"{kept}/{len(kills)}", f"<= {repeated}"])
        values[name] = {
            "total_s": [round(value, 4) for value in times],
            "p50_s": round(median(times), 4),
            "p95_s": round(quantile(times, 0.95), 4),
            "max_s": round(max(times), 4),
            "survivors_kept": kept,
            "max_steps_repeated": repeated,
        }
    table(rows)
    values["phases_p50_s"] = phases(found)
    if "torchrun" in found:
        for name in ("spare", "no spare"):
            ratio = values["torchrun"]["p50_s"] / values[name]["p50_s"]
            values[name]["times_faster_than_torchrun"] = round(ratio, 1)
            print(f"torchrun / deadpool-run ({name}), medians: {ratio:.1f}x")
    return values


def phases(found: dict[str, list[Kill]]) -> dict[str, dict[str, float]]:
    """Print and return the median time of each part's end, in seconds after the launcher knew of the loss."""
    rows: list[list[object]] = [
        ["end after the loss was known, ms, p50", *(name.removesuffix("_s") for name in PHASES)]
    ]
    middle: dict[str, dict[str, float]] = {}
    for name, kills in found.items():
        if not kills[0].incident:
            continue
        middle[name] = {phase: round(median(kill.incident[phase] for kill in kills), 5) for phase in PHASES}
        rows.append([name, *map(milliseconds, middle[name].values())])
        losses = [loss for kill in kills for loss in kill.incident["losses"]]
        print(
            f"{name}: {sum(loss['from_spare'] for loss in losses)} of {len(losses)} ranks were taken by a waiting spare"
        )
    table(rows)
    return middle


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"


def main() -> int:
    args = options()
    header("recovery", vars(args))
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as home:
        try:
            out = measure(args, Path(home))
        except BenchError as error:
            print(f"recovery: {error}", file=sys.stderr)
            return 1
    result("recovery", {"parameters": vars(args), "results": show(out)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
