"""An ordinary torch.distributed script that has never heard of deadpool-run. `--die RANK`: in its first life."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from telling import tell

parser = argparse.ArgumentParser()
parser.add_argument("--die", type=int, default=-1)
parser.add_argument("--always", action="store_true")
parser.add_argument("--flags", type=Path, required=True)
args = parser.parse_args()

tell("start")
dist.init_process_group("gloo")
total = torch.ones(1)
for step in range(5):
    if dist.get_rank() == args.die and step == 3:
        flag = args.flags / "died"
        if args.always or not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(total)
tell("end", total=total.item())
dist.destroy_process_group()
