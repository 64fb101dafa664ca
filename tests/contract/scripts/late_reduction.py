"""Trains under DDP with its first reduction after several steps: late_reduction.py ACCUMULATED [--sharded]."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2] / "process" / "scripts"))

from telling import tell

import deadpool_run as deadpool

WIDTH = 37


def main():
    accumulated = int(sys.argv[1])
    job = deadpool.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)]), bucket_cap_mb=0.01)
    if "--sharded" in sys.argv:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(3 * accumulated):
        tell("step", index=step.index, rehearsing=job.rehearsing)
        with step:
            last = step.index % accumulated == accumulated - 1
            inputs = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step.index + job.rank))
            with contextlib.nullcontext() if last else model.no_sync():
                model(inputs).pow(2).mean().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    tell("end")


if __name__ == "__main__":
    main()
