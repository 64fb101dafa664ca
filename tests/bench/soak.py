"""Many kills in one job: checks that no process grows, and that the weights equal those of an unfailed run.

    python tests/bench/soak.py [--kills 50] [--ranks 4] [--quick]

Rank 0 is never killed, so its process lives through every repair. (recovery.py kills rank 0, too.) After each kill, when the
world trains again and a spare is ready, the benchmark reads resident memory and open descriptors of the agent, of rank 0
and of all other processes of the job. The exit code is 1 if the last ten readings exceed the first ten (after a few kills
to warm up) by more than the bounds, or if the final digests differ from those of the unfailed run.
"""

import argparse
import random
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from common import BenchError, Run, deadpool, header, kill_and_time, result, table
from recovery import await_calm

WARM_UP_KILLS = 5
STEPS_PER_KILL = 60
"""Steps per kill: more than pass during a kill, its repair and the start of a spare."""
RSS_BOUND_MIB = 8.0
"""The allowed growth of one process in MiB: noise of the allocator, but not a leak in each of 50 repairs."""
DESCRIPTOR_BOUND = 2
"""The allowed growth of one process in descriptors. A leak of one descriptor per kill would be 40."""


@dataclass(frozen=True)
class Reading:
    """Figures of the job's processes after one kill."""

    agent_mib: float
    agent_fds: int
    witness_mib: float
    witness_fds: int
    others: int
    others_mib: float
    others_fds: int


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="12 kills")
    args = parser.parse_args()
    args.kills = 12 if args.quick else args.kills
    if args.ranks < 2 or args.kills < WARM_UP_KILLS + 2:
        parser.error(f"at least 2 ranks and {WARM_UP_KILLS + 2} kills are needed")
    return args


def read(run: Run) -> Reading:
    agent = psutil.Process(run.process.pid)
    witness = psutil.Process(run.pid(0))
    others = [child for child in agent.children(recursive=True) if child.pid != witness.pid]
    return Reading(
        agent_mib=agent.memory_info().rss / 2**20,
        agent_fds=agent.num_fds(),
        witness_mib=witness.memory_info().rss / 2**20,
        witness_fds=witness.num_fds(),
        others=len(others),
        others_mib=sum(child.memory_info().rss for child in others) / 2**20,
        others_fds=sum(child.num_fds() for child in others),
    )


def soak(args: argparse.Namespace, home: Path) -> tuple[list[Reading], list[float], bool]:
    """Return the readings, the recovery times in seconds, and whether the digests equal those of an unfailed run."""
    script = ("--parallel", args.parallel, "--steps", STEPS_PER_KILL * args.kills)
    with deadpool(home / "unfailed", args.ranks, 1, *script) as run:
        run.end(1200)
        expected = run.digests()
    dice = random.Random(args.seed)
    readings: list[Reading] = []
    times: list[float] = []
    with deadpool(home / "soak", args.ranks, 1, *script) as run:
        await_calm(run, 1, 0)
        for number in range(args.kills):
            recovery = kill_and_time(run, dice.randrange(1, args.ranks), 120)
            if not recovery.survivors_kept:
                raise BenchError(f"kill {number}: a survivor was replaced, too; last lines:\n{run.output()}")
            times.append(recovery.total_s)
            await_calm(run, 1, recovery.step)
            readings.append(read(run))
        run.end(1200)
        return readings, times, run.digests() == expected


def growth(readings: list[Reading]) -> dict[str, float]:
    """Return the growth of each figure from the first readings after the warm-up to the last ones."""
    warm = readings[WARM_UP_KILLS:]
    share = min(10, len(warm) // 2)
    grown = {}
    for name in asdict(readings[0]):
        first, last = ([getattr(one, name) for one in part] for part in (warm[:share], warm[-share:]))
        grown[name] = median(last) - median(first)
    return grown


def verdict(grown: dict[str, float], others: int) -> list[str]:
    """Return a message for each figure above its bound."""
    bounds = {
        "agent_mib": RSS_BOUND_MIB,
        "witness_mib": RSS_BOUND_MIB,
        "others_mib": RSS_BOUND_MIB * others,
        "agent_fds": DESCRIPTOR_BOUND,
        "witness_fds": DESCRIPTOR_BOUND,
        "others_fds": DESCRIPTOR_BOUND * others,
        "others": 0,
    }
    return [
        f"{name} grew by {grown[name]:.1f}, more than {bound:g}"
        for name, bound in bounds.items()
        if grown[name] > bound
    ]


def show(readings: list[Reading]) -> None:
    rows: list[list[object]] = [["after kill", *(name.replace("_", " ") for name in asdict(readings[0]))]]
    for number, reading in enumerate(readings, 1):
        if number <= 3 or number % 5 == 0 or number == len(readings):
            rows.append(
                [number, *(f"{value:.1f}" if isinstance(value, float) else value for value in asdict(reading).values())]
            )
    table(rows)


def main() -> int:
    args = options()
    header("soak", {**vars(args), "rss_bound_mib": RSS_BOUND_MIB, "descriptor_bound": DESCRIPTOR_BOUND})
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as home:
        try:
            readings, times, same = soak(args, Path(home))
        except BenchError as error:
            print(f"soak: {error}", file=sys.stderr)
            return 1
    show(readings)
    grown = growth(readings)
    faults = verdict(grown, readings[-1].others)
    print("growth: " + ", ".join(f"{name} {value:+.1f}" for name, value in grown.items()))
    print("flat: " + ("yes" if not faults else "NO: " + "; ".join(faults)))
    print(f"digests: {'equal to the unfailed run' if same else 'DIFFERENT from the unfailed run'}")
    values: dict[str, Any] = {
        "growth": grown,
        "faults": faults,
        "digests_equal": same,
        "p50_s": round(median(times), 4),
    }
    result("soak", {"parameters": vars(args), "results": values})
    return 0 if same and not faults else 1


if __name__ == "__main__":
    sys.exit(main())
