"""A dict of the loop has a match beside a learning rate; rank 1 may die in step 7: kept_with_a_part.py HOW.

The weights depend on the rate. With HOW "used", they also depend on the match."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import re
import signal
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool

DIES = 7


def main():
    job = deadpool.init()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    best = {"scale": 1.0, "inner": {"losses": []}}
    for step in job.steps(10):
        with step:
            loss = (model(torch.full((4, 8), best["scale"])) - 1).pow(2).mean()
            loss.backward()
            dies = sys.argv[1] != "no loss" and (step.index, job.rank, job.rebuilds) == (DIES, 1, 0)
            if dies and not job.rehearsing:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            best["scale"] *= 0.75
            best["inner"]["losses"].append(loss.item())
            if step.index == DIES and sys.argv[1] == "used":
                best["scale"] *= float(best["inner"]["match"].group())
            best["inner"]["match"] = re.match(r"\S+", f"0.{step.index + 1} of all")
    found = model.module.weight.detach().double().sum().item().hex()
    print(f"rank {job.rank}: {found} {sum(best['inner']['losses']).hex()}", flush=True)


if __name__ == "__main__":
    main()
