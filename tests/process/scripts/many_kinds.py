"""One job with many kinds of state. Each scales the gradient of a parameter of its own, but only from a late step on.

Until then the trial finds no difference in the weights. So what a snapshot lacks shows at the end, by the name of its kind.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import random
import types
from pathlib import Path

import kinds_of_objects
import kinds_of_values  # noqa: F401 - adds its kinds
import numpy as np
import torch
from faults import Faults
from kinds_kit import KINDS
from telling import tell
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool

LATER = 2
"""The last step in which no kind has an effect."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.of_kinds = nn.ParameterDict({name: nn.Parameter(torch.ones(2)) for name in KINDS})
        self.inner, self.extra = nn.Linear(2, 2), kinds_of_objects.Extra()
        self.told, self.rows = {"rows": []}, []
        self.register_buffer("buffer", torch.zeros(8))
        self.register_buffer("volatile", torch.zeros(()), persistent=False)

    def forward(self, x):
        return sum((each * x).sum() for each in self.of_kinds.values()) + self.inner(x).sum()


def wrapped(model, parallel):
    if parallel == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model.inner)
    return fully_shard(model)


def first_of(parameter):
    """Return the first element: all are equal."""
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return whole.detach()[0].item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--parallel", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--flags", type=Path, required=True)
    parser.add_argument("--die", action="append", default=[])
    args = parser.parse_args()
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the global generator is a kind
    torch.manual_seed(0)
    job = deadpool.init()
    model = Model()
    ddp = wrapped(model, args.parallel)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    ddp.seen, optimizer.seen, scheduler.notes = 0, 0, [0]
    optimizer.param_groups[0].update(history=[], stats={"n": 0})
    run = types.SimpleNamespace(model=model, ddp=ddp, optimizer=optimizer, scheduler=scheduler, step=0)
    job.protect(model=ddp, optimizer=optimizer, scheduler=scheduler)
    faults = Faults(args.die, args.flags, job.rank)
    for step in job.steps(args.steps):
        run.step = step.index
        faults.begin_step(step.index, rehearsing=job.rehearsing)
        with step:
            faults.reach("before")
            ddp(torch.full((2,), 1.0 + job.rank + step.index)).backward()
            for name, change in KINDS.items():
                number = change(run)
                if step.index > LATER:
                    model.of_kinds[name].grad.mul_(1 + 0.01 * number)
            faults.reach("after")
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        faults.reach("between")
    tell("weights", of_kinds={name: first_of(each) for name, each in model.of_kinds.items()})


if __name__ == "__main__":
    main()
