"""Runs one item of the matrix (items.py) with its deaths, and writes the digest of every state."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import faulthandler
import hashlib
import multiprocessing
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

sys.path[:0] = [str(Path(__file__).parents[2] / "process" / "scripts"), str(Path(__file__).parents[2])]

from faults import Faults
from items import ITEMS
from telling import tell

import deadpool_run as deadpool
from deadpool_run.worker.snapshot.writer import Writer


def add(sha, value):
    """Hash a tree: the bytes of this rank's part of tensors, the repr of other values."""
    if torch.is_tensor(value):
        value = value.detach()
        value = value._local_tensor if hasattr(value, "_local_tensor") else value
        if hasattr(value, "__tensor_flatten__"):
            add(sha, [getattr(value, name) for name in value.__tensor_flatten__()[0]])
            return
        sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
        sha.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            sha.update(str(key).encode())
            add(sha, value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            add(sha, part)
    elif isinstance(value, np.ndarray):
        sha.update(value.tobytes())
    else:
        sha.update(repr(value).encode())


def digest(loop):
    """Return a hash of all state of this rank's next step."""
    sha = hashlib.sha256()
    for name, obj in sorted({**loop.protect, **loop.watched}.items()):
        sha.update(name.encode())
        if isinstance(obj, torch.optim.Optimizer):
            keeper = getattr(obj, "optim", obj)  # ZeroRedundancyOptimizer keeps its state in an inner optimizer
            groups = obj.param_groups
            add(sha, [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups])
            for parameter in [parameter for group in groups for parameter in group["params"]]:
                add(sha, [parameter, keeper.state.get(parameter, {}), parameter.requires_grad])
                add(sha, parameter.grad if loop.grads else None)
        elif isinstance(obj, nn.Module):
            if not any(isinstance(child, FSDPModule) for child in obj.modules()):
                add(sha, [[p, p.requires_grad] for p in obj.parameters()])
            add(sha, list(obj.buffers()))
        else:
            add(sha, obj.state_dict() if hasattr(obj, "state_dict") else vars(obj))
    add(sha, [torch.get_rng_state(), repr(random.getstate()), np.random.get_state()[1]])  # noqa: NPY002
    return sha.hexdigest()[:16]


def watch_captures(faults):
    """Add a place in the middle of each copy. A death there names the copied version, not the step that runs."""
    write, copy = Writer.write, Writer._copy
    versions = []

    def noted(self, memory, order):
        versions.append(order.version)
        return write(self, memory, order)

    def halved(self, targets, sources):
        half = len(targets) // 2
        copy(self, targets[:half], sources[:half])
        faults.reach("capture", versions[-1])
        copy(self, targets[half:], sources[half:])

    Writer.write, Writer._copy = noted, halved


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--item", choices=ITEMS, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--die", action="append", default=[], help="a fault, in the syntax of faults.py")
    parser.add_argument(
        "--flags", type=Path, default=Path(), help="folder with marks of events that happen once per job"
    )
    return parser.parse_args()


def join(flags, event="start"):
    """Set up this process, write `event`, join the job, and seed every generator with the rank."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    faulthandler.register(signal.SIGUSR2)  # the test asks hung workers for their stacks
    multiprocessing.current_process()._config["tempdir"] = str(flags)  # killed processes do not clean up
    tell(event)
    job = deadpool.init()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(job.rank)
    return job


def hook(loop, job, faults):
    """Hook the faults into their places in a loop, before it is protected."""
    faults.hook(loop)
    if faults.wants("capture") and job.protected:
        watch_captures(faults)


def run_steps(loop, job, faults, steps, before=lambda _index: None):
    """Run the loop with its faults, and write the state of every version. `before` is called in each real step."""
    for step, *batch in loop.steps(job, steps):
        if not job.rehearsing:
            # A step lasts until the loop asks for the next one, so the state here is that of this version.
            before(step.index)
            told = {} if not batch else {"batch": loop.told(step, batch[0])}
            tell("state", version=step.index, digest=digest(loop), **told)
        faults.begin_step(step.index, rehearsing=job.rehearsing)
        faults.reach("before")
        with step:
            loop.step(step.index, *batch)
        faults.reach("after")
        loop.between(step.index)
        faults.reach("between")
    tell("state", version=steps, digest=digest(loop))


def main():
    args = parse_arguments()
    job = join(args.flags)
    faults = Faults(args.die, args.flags, job.rank)
    faults.quiet = job.rehearsing
    loop = ITEMS[args.item](job.rank, job.world_size)
    hook(loop, job, faults)
    job.protect(**loop.protect)
    run_steps(loop, job, faults, args.steps)
    tell("end")


if __name__ == "__main__":
    main()
