"""The script of `spares.py`: DDP on a small network, with a set-up of the given duration."""

import argparse
import importlib
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool

WIDTH = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--set-up-s", type=float, default=0.0, help="the duration of set-up, in seconds of one core")
    parser.add_argument("--imports", action="store_true", help="import a module that takes a while to import")
    args = parser.parse_args()
    torch.set_num_threads(1)
    job = deadpool.init()
    if args.imports:
        importlib.import_module("torch._inductor.compile_fx")
    until = time.thread_time() + args.set_up_s
    while time.thread_time() < until:
        torch.randn(256, 256).sum()
    torch.manual_seed(0)
    network: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    if args.compile:
        network.compile()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.protect(model=model, optimizer=optimizer)
    log = os.open(args.step_log / f"rank{job.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for step in job.steps(10**6):
        with step:
            model(torch.randn(8, WIDTH)).pow(2).mean().backward()
            time.sleep(0.02)
            optimizer.step()
            optimizer.zero_grad()
        if not job.rehearsing:
            os.write(log, b"%d %d %d\n" % (step.index, time.monotonic_ns(), os.getpid()))


if __name__ == "__main__":
    main()
