"""Loses rank 1 in step 4. From step LATER on, the rate depends on a count in a queue: late_difference.py STEPS LATER [KEPT].

With KEPT, steps LATER and LATER + 1 wait until the version before them is durable there.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import queue
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool

DIES = 4


def wait_for(path):
    """Wait up to 20 seconds."""
    until = time.monotonic() + 20
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.01)


def main():
    job = deadpool.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    counts, (steps, later), kept = queue.SimpleQueue(), map(int, sys.argv[1:3]), sys.argv[3:]
    counts.put(0.0)  # the trial refuses integers
    for step in job.steps(steps):
        with step:
            if kept and step.index in (later, later + 1):
                wait_for(Path(kept[0], f"step-{step.index:08d}"))
            count = counts.get()
            counts.put(count + 1)
            if step.index >= later:
                optimizer.param_groups[0]["lr"] = 0.1 / (1 + count)
            model(torch.full((4, 8), 1 / (1 + step.index))).pow(2).mean().backward()
            if (step.index, job.rank, job.rebuilds, job.rehearsing) == (DIES, 1, 0, False):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
