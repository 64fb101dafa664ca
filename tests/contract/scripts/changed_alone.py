"""Each step changes objects of a library that no snapshot holds. In this run, none of them has an effect."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import re
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool


class Meter:
    """Counts, beside a part that no snapshot holds."""

    def __init__(self, beside):
        self.count, self.beside = 0, beside


Meter.__module__ = "of.a.library"


def main():
    job = deadpool.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average, bar, unchanged = (Meter(beside) for beside in (re.match("a", "a"), [sys.stdout], re.match("a", "a")))
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(4):
        model(torch.full((4, 8), 1 / (1 + step.index))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        average.count += 1
        bar.count += 1
    print("trained to the end with", unchanged.count)


if __name__ == "__main__":
    main()
