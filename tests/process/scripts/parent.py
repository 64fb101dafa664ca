"""A training whose ranks start helper processes, as data loaders do, and lose one rank."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import signal
import subprocess
import sys

import torch
from telling import tell

import deadpool_run as deadpool

job = deadpool.init()
tell("start")
helper = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
tell("helper", helper=helper.pid)
weight = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
job.protect(model=weight, optimizer=optimizer)
for step in job.steps(8):
    with step:
        if sys.argv[1:] == ["die"] and step.index == 4 and job.rank == 1 and os.environ["DEADPOOL_REPLACEMENT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        weight(total.expand(2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
tell("end")
