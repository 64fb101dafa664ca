"""An ordinary torch.distributed script that has never heard of deadpool-run.

`--die RANK`: in its first life. `--hold RANK`: it waits in its first life, until the test has done something to it.
"""

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
parser.add_argument("--hold", type=int, default=-1)
parser.add_argument("--always", action="store_true")
parser.add_argument("--flags", type=Path, required=True)
args = parser.parse_args()

tell("start")
dist.init_process_group("gloo")
met = dist.distributed_c10d._get_default_store().add("met", 1)  # counts from 1 in every life
dist.barrier()
total = torch.ones(1)
for step in range(5):
    if dist.get_rank() == args.die and step == 3:
        flag = args.flags / "died"
        if args.always or not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    if dist.get_rank() == args.hold and step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        tell("held", store=[os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]])
        signal.pause()
    dist.all_reduce(total)
tell("end", total=total.item(), met=met)
dist.destroy_process_group()
