"""A net that is not protected takes the weights in step 9, counted or through `.data`: late_change.py HOW [replaced].

Rank 1 dies in step 12. With `replaced`, each rank has died before step 9 too.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import copy
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool

CHANGES = 9
DEATHS = {(12, 1)}
if "replaced" in sys.argv:
    DEATHS |= {(4, 1), (6, 0)}


def once(what):
    """Return True once in this run, whichever process asks."""
    path = Path(os.environ["DEADPOOL_RUN_DIR"], what)
    is_first = not path.exists()
    path.touch()
    return is_first


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
            if (step.index, job.rank) in DEATHS and once(f"died-{step.index}"):
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
