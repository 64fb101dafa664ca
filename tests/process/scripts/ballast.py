"""Trains a small layer beside a large frozen one, so that snapshots are large and steps are short."""

import hashlib
import sys

import torch
import torch.distributed as dist
from torch import nn

import deadpool_run

MIB = 1 << 20


def main() -> None:
    ballast, steps = int(sys.argv[1]), int(sys.argv[2])
    job = deadpool_run.init()
    torch.manual_seed(1)
    model = nn.ParameterDict(
        {"small": torch.ones(1000), "large": nn.Parameter(torch.ones(ballast * MIB // 4), requires_grad=False)}
    )
    optimizer = torch.optim.SGD([model["small"]], lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(steps):
        with step:
            optimizer.zero_grad()
            (model["small"] * float(step.index + job.rank)).pow(2).mean().backward()
            dist.all_reduce(model["small"].grad)
            optimizer.step()
    print(hashlib.sha256(model["small"].detach().numpy().tobytes()).hexdigest())


main()
