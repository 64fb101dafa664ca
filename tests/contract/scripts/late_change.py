"""A net that is not protected takes the weights in step 9, counted or through `.data`; rank 1 dies in step 12: late_change.py HOW."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import signal
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool

CHANGES, DIES = 9, 12


def main():
    job = deadpool.init()
    torch.manual_seed(0)
    net = nn.Linear(8, 8)
    target, model = copy.deepcopy(net).requires_grad_(False), DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(15):
        with step:
            x = torch.full((4, 8), 1 / (1 + step.index))
            (model(x) - target(x) - 1).pow(2).mean().backward()
            if (step.index, job.rank, job.rebuilds, job.rehearsing) == (DIES, 1, 0, False):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            if step.index == CHANGES and sys.argv[1] == "counted":
                target.load_state_dict(net.state_dict())
            elif step.index == CHANGES:
                for ours, theirs in zip(target.parameters(), net.parameters(), strict=True):
                    ours.data.copy_(theirs.data)
    print("trained to the end")


if __name__ == "__main__":
    main()
