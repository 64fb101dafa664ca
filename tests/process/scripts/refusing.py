"""Refuses to go on in step 0, on one rank only; `--misuse` protects one name twice instead, on one rank only."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys

import torch
import torch.distributed as dist
from telling import tell

import deadpool_run as deadpool
from deadpool_run.errors import RefusedError

REASON = "the optimizer is protected by nobody.\nWrite job.protect(optimizer=optimizer)."


def check():
    raise RefusedError(REASON)


tell("start")
job = deadpool.init()
model = torch.nn.Linear(2, 2)
job.protect(model=model)
if "--misuse" in sys.argv and dist.get_rank() == 1:
    job.protect(model=model)
for _ in job.steps(5):
    if dist.get_rank() == 1:
        check()
    dist.all_reduce(torch.ones(1))
tell("end")
