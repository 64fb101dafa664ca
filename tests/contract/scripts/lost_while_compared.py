"""Loses rank 1 in step 6, and the ranks LOST when replicas are first compared after that: lost_while_compared.py LOST.

The restore of rank 1's first replacement is wrong by one in each weight.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import contextlib
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool
from deadpool_run.worker.verify.agreement import Agreement

DIES = 6
FOLDER = Path(os.environ["DEADPOOL_RUN_DIR"])
"""Has what no snapshot may take back."""
compares = Agreement.compare


def is_new():
    return (FOLDER / f"new-{os.getpid()}").exists()


def once(what):
    with contextlib.suppress(FileExistsError):
        (FOLDER / what).touch(exist_ok=False)
        return True
    return False


def main():
    job = deadpool.init(verify=False)  # otherwise the first reduction of the repeated step shows it
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    lost = list(map(int, sys.argv[1:]))

    def compare(agreement, *, strict, **more):
        if not strict and (FOLDER / "lost").exists():
            if job.rank in lost and not is_new():
                os.kill(os.getpid(), signal.SIGKILL)
            if job.rank == 1 and once("spoilt"):
                with torch.no_grad():
                    model.module.weight += 1
        return compares(agreement, strict=strict, **more)

    Agreement.compare = compare
    for step in job.steps(12):
        if job.rehearsing and step.index == 0:
            once(f"new-{os.getpid()}")
        with step:
            if step.index == DIES and job.rank == 1 and once("lost"):
                os.kill(os.getpid(), signal.SIGKILL)
            model(torch.full((4, 8), 1 / (1 + step.index))).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
