"""Runs the loop of a drawn job (see draw.py) with its faults, and gives the search an account of every state."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import faulthandler
import multiprocessing
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[1:1] = map(str, (HERE.parents[1] / "loops" / "scripts", HERE.parents[1] / "process" / "scripts", HERE.parent))

from composed import compose
from draw import Job
from faults import Faults
from items import ITEMS
from loop import digest, watch_captures
from telling import tell

import deadpool_run as deadpool


def spoil(loop):
    """Move one weight of this rank by one unit in its last place."""
    weight = next(parameter for parameter in loop.protect["model"].parameters()).detach().view(-1)
    weight[0] = torch.nextafter(weight[0], weight[0] + 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=Path, required=True)
    parser.add_argument("--flags", type=Path, required=True, help="folder for what is to happen once in a job")
    parser.add_argument("--unfailed", action="store_true")
    args = parser.parse_args()
    drawn = Job.read(args.job.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    faulthandler.register(signal.SIGUSR2)  # the search asks where a worker is that makes no progress
    multiprocessing.current_process()._config["tempdir"] = str(args.flags)  # a killed process cannot clean up
    ahead = os.environ.get("DEADPOOL_PREPARING") == "1"  # a spare without a rank: it holds one from its first true step
    tell("prepare" if ahead else "start")
    job = deadpool.init()
    faults = Faults([] if args.unfailed else drawn.deaths, args.flags, job.rank)
    faults.quiet = job.rehearsing
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(job.rank)
    loop = ITEMS[drawn.loop["item"]](job.rank, job.world_size) if "item" in drawn.loop else compose(drawn.loop, job)
    faults.hook(loop)
    if faults.wants("capture") and job.protected:
        watch_captures(faults)
    faults.reach("setup")
    job.protect(**loop.protect)
    replacement, begun = os.environ.get("DEADPOOL_REPLACEMENT") == "1", set()
    for step, *batch in loop.steps(job, drawn.steps):
        if not job.rehearsing:
            if ahead:
                tell("start")
                ahead = False
            # A step lasts until the loop asks for the next one: here, always, is the state of this version.
            if drawn.planted and replacement and not begun:
                spoil(loop)
            begun.add(step.index)
            told = {} if not batch else {"batch": loop.told(step, batch[0])}
            tell("state", version=step.index, digest=digest(loop), **told)
        faults.begin_step(step.index, rehearsing=job.rehearsing)
        faults.reach("before")
        with step:
            loop.step(step.index, *batch)
        faults.reach("after")
        loop.between(step.index)
        faults.reach("between")
    tell("state", version=drawn.steps, digest=digest(loop))
    faults.reach("end")
    tell("end")


if __name__ == "__main__":
    main()
