"""The script of `overhead.py --load images`: a small convolution on a new batch of images in each step, which is all that is large.

An image is 588 KiB: three colours of 224 x 224 pixels in single precision.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-log", type=Path, required=True)
    parser.add_argument("--digest-dir", type=Path)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    args = parser.parse_args()
    job = deadpool.init()
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    log = os.open(args.step_log / f"rank{job.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for step in job.steps(args.steps):
        with step:
            images = torch.full((args.batch, 3, 224, 224), float(step.index % 7))
            loss = model(images).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if not job.rehearsing:
            os.write(log, b"%d %d %d\n" % (step.index, time.monotonic_ns(), os.getpid()))


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
