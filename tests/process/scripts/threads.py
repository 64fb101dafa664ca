"""Sets the number of threads before it imports torch, as under torchrun, and then tells how many torch uses."""

import os
import sys

os.environ["OMP_NUM_THREADS"] = "3"

import torch
import torch.distributed as dist
from telling import tell

import deadpool_run as deadpool

if "--own" in sys.argv:
    torch.set_num_threads(2)
deadpool.init()
dist.barrier()  # a peer may still be connecting
tell("threads", found=torch.get_num_threads())
