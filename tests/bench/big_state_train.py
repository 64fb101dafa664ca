"""The script of `big_state.py` and `nodes.py --mib`: DDP or FSDP2 on linear layers, with a state of the given size in each rank.

A replacement appends a line for each part of its rehearsal to a file in the step log's folder: the part, the time of its
end, and the CPU time until then.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool

WIDTH = 2048
STATE_BYTES = 3 * 4 * WIDTH * WIDTH  # of one layer: the weight and both averages of AdamW


def now() -> str:
    return f"{time.monotonic_ns()},{time.process_time_ns()}"


def sharded(network: nn.Sequential) -> nn.Module:
    for layer in network:
        fully_shard(layer)
    return fully_shard(network)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--mib", type=int, required=True, help="state per rank, in MiB")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    args = parser.parse_args()
    began = now()
    job = deadpool.init()
    marks = os.open(args.step_log / f"rehearsal{job.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def mark(part: str, at: str = "") -> None:
        if job.rehearsing:
            os.write(marks, f"{part},{at or now()}\n".encode())

    mark("script", began)
    mark("init")
    torch.manual_seed(0)
    share = 1 if args.parallel == "ddp" else job.world_size
    layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(round(share * args.mib * 2**20 / STATE_BYTES)))
    network = nn.Sequential(*layers)
    mark("model")
    model = DistributedDataParallel(network) if args.parallel == "ddp" else sharded(network)
    mark("DDP")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    job.protect(model=model, optimizer=optimizer)
    log = os.open(args.step_log / f"rank{job.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for step in job.steps(10**6):
        mark(f"before {step.index}")
        with step:
            model(torch.randn(2, WIDTH)).pow(2).mean().backward()
            mark(f"backward {step.index}")
            optimizer.step()
            optimizer.zero_grad()
        mark(f"step {step.index}")
        if not job.rehearsing:
            os.write(log, b"%d %d %d\n" % (step.index, time.monotonic_ns(), os.getpid()))


if __name__ == "__main__":
    main()
