"""Reads a file that all ranks have in memory; with `--writes`, each rank also adds to its element. Rank 1 dies in step 5 with `--die`."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hashlib
import signal
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from telling import tell
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool

job = deadpool.init()
folder, writes, dies = Path(sys.argv[1]), "--writes" in sys.argv, "--die" in sys.argv
rank = dist.get_rank()
memory = np.memmap(folder / "memory", np.float32, "r+")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
job.protect(model=model, optimizer=optimizer)
for step in job.steps(10):
    with step:
        inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step.index + rank))
        loss = (model(inputs) - 0.3).square().mean() * (1 + float(memory[rank]))
        loss.backward()
        flag = folder / "died"
        if dies and rank == 1 and step.index == 5 and not job.rehearsing and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        if writes:
            memory[rank] = 0.5 * memory[rank] + float(loss.detach())
weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
tell("end", digest=hashlib.sha256(weights).hexdigest())
dist.destroy_process_group()
