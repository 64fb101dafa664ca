"""Runs the loop of a drawn job (draw.py) with its faults, and writes the digest of every state."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
sys.path[1:1] = map(str, (TESTS / "loops" / "scripts", TESTS / "process" / "scripts", HERE.parent, TESTS))

from composed import compose
from draw import Job
from faults import Faults
from items import ITEMS
from loop import hook, join, run_steps
from telling import tell


def spoil(loop):
    """Change one weight of this rank by one unit in the last place."""
    weight = next(parameter for parameter in loop.protect["model"].parameters()).detach().view(-1)
    weight[0] = torch.nextafter(weight[0], weight[0] + 1)


class Attempts(set):
    """The steps that were begun. Because of its slots, snapshots do not keep it: a repeated step sees it unrestored."""

    __slots__ = ()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument(
        "--flags", type=Path, required=True, help="folder with marks of events that happen once per job"
    )
    parser.add_argument("--unfailed", action="store_true")
    args = parser.parse_args()
    drawn = Job.from_json(args.job.read_text(encoding="utf-8"))
    ahead = os.environ.get("DEADPOOL_PREPARING") == "1"  # a hot spare gets a rank with its first real step
    job = join(args.flags, "prepare" if ahead else "start")
    faults = Faults([] if args.unfailed else drawn.deaths, args.flags, job.rank)
    faults.quiet = job.rehearsing
    loop = ITEMS[drawn.loop["item"]](job.rank, job.world_size) if "item" in drawn.loop else compose(drawn.loop, job)
    hook(loop, job, faults)
    faults.reach("setup")
    job.protect(**loop.protect)
    replacement, begun = os.environ.get("DEADPOOL_REPLACEMENT") == "1", Attempts()

    def before(index):
        if ahead and not begun:
            tell("start")
        if drawn.planted and replacement and not begun:
            spoil(loop)
        begun.add(index)

    run_steps(loop, job, faults, drawn.steps, before)
    faults.reach("end")
    tell("end")


if __name__ == "__main__":
    main()
