"""Prints and logs the loss of each step. Rank 1 is killed once, in a step in which rank 0 waits for it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import logging
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool

LOST_IN = 5
LOG = logging.getLogger(__name__)


def main(flag):
    job = deadpool.init()
    torch.manual_seed(0)
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(9):
        with step:
            loss = model(torch.full((4, 8), (1 + job.rank) / (1 + step.index))).pow(2).mean()
            dist.all_reduce(torch.zeros(1))  # rank 0 has begun the step
            if job.rank == 1 and step.index == LOST_IN and not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            both = loss.detach().clone()
            dist.all_reduce(both)
            if job.rank == 0:
                print("step", step.index, "in", both.item(), flush=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if job.rank == 0:
            print("step", step.index, "after", both.item(), flush=True)
            LOG.info("step %d logged %r", step.index, both.item())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
