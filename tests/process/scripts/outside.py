"""Reduces before and after its step loop, and tells each result, as a script would save it. `--die AT`: rank 1 does there, once.

`--break`: the script leaves its loop early.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from telling import tell
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool

parser = argparse.ArgumentParser()
parser.add_argument("--die", choices=("before", "after"), required=True)
parser.add_argument("--break", action="store_true", dest="breaks")
parser.add_argument("--flags", type=Path, required=True)
args = parser.parse_args()


def reduce(at):
    for number in range(5):
        flag = args.flags / "died"
        if args.die == at and number == 2 and dist.get_rank() == 1 and not job.rehearsing and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.tensor(float(dist.get_rank() + 1))
        dist.all_reduce(total)
        if not job.rehearsing:
            tell("total", at=at, value=total.item())


job = deadpool.init()
model = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
reduce("before")
for step in job.steps(4):
    with step:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if args.breaks and step.index == 2:
        break
reduce("after")
