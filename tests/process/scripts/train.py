"""The training that most tests run: any layout, any fault, and an account of every step to the test."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import faulthandler
import functools
import hashlib
import json
import random
import signal
import sys
import time
from pathlib import Path

import astray
import numpy as np
import torch
from faults import Faults
from layouts import LAYOUTS
from telling import tell

import deadpool_run as deadpool


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=LAYOUTS, default="ddp")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--die", action="append", default=[], help="a fault; see faults.py")
    parser.add_argument("--flags", type=Path, default=Path(), help="folder for what is to happen once in a job")
    parser.add_argument("--ballast-mb", type=int, default=0, help="protected weight that takes no part (ddp)")
    parser.add_argument(
        "--corrupt", choices=["replacement", "survivor"], help="spoil a recovery by one unit in one weight"
    )
    parser.add_argument("--hold", type=int, default=-1, help="step before which a rank waits for the test")
    parser.add_argument("--hold-rank", type=int, default=0, help="which rank does; all, if -1")
    parser.add_argument(
        "--hold-replacements", action="store_true", help="have replacements wait for the test before init()"
    )
    parser.add_argument("--astray", choices=["", *astray.KINDS], default="", help="how it reacts to empty answers")
    parser.add_argument("--astray-rank", type=int, default=-1, help="which rank does; all, if none is named")
    parser.add_argument("--least-ms", type=int, default=0, help="how long a step takes at least")
    parser.add_argument("--quiet-from", type=int, default=1 << 30, help="step from which on no state is told: it waits")
    return parser.parse_args()


def local(tensor):
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def digest(training):
    """Return a hash of all that this rank's next step depends on."""
    sha = hashlib.sha256()
    tensors = [*training.model.parameters(), *training.model.buffers()]
    for parameter in training.model.parameters():
        state = training.optimizer.state.get(parameter, {})
        tensors += [state[key] for key in sorted(state) if torch.is_tensor(state[key])]
    for tensor in tensors:
        if tensor.numel() <= 1 << 16:  # not the ballast
            sha.update(local(tensor).contiguous().numpy().tobytes())
    sha.update(json.dumps([group["lr"] for group in training.optimizer.param_groups]).encode())
    if training.scheduler is not None:
        sha.update(json.dumps(training.scheduler.state_dict(), default=str, sort_keys=True).encode())
    sha.update(torch.get_rng_state().numpy().tobytes())
    sha.update(repr(random.getstate()).encode())
    sha.update(np.random.get_state()[1].tobytes())  # noqa: NPY002
    return sha.hexdigest()[:16]


def spoil(training):
    """Move one weight of this rank by one unit in its last place."""
    weight = local(next(parameter for parameter in training.model.parameters() if local(parameter).numel()))
    flat = weight.view(-1)
    flat[0] = torch.nextafter(flat[0], flat[0] + 1)


AHEAD = 4
"""The step from which on the host runs ahead: before that, torch reads a CPU tensor's memory directly, to compare shapes."""


def fake_device():
    """Have collectives run on a device with NCCL's semantics."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
    from kit.device import fake_device as fake  # noqa: PLC0415 - only here

    return fake.use()


def go_ahead(device, index):
    """Have the host run ahead of the device from a step on."""
    if index >= AHEAD and os.environ.get("FAKE_DEVICE") == "ahead":
        device.run_ahead()


def tell_state(training, version, quiet_from):
    """Tell the state, which waits for the device."""
    if version < quiet_from:
        tell("state", version=version, digest=digest(training))


class Attempts(set):
    """Steps that were begun. Snapshots keep no container with slots: it is not restored before a step is repeated."""

    __slots__ = ()


Attempts.__module__ = "builtins"  # the test's and not the script's: a replacement does not name it


def main():
    args = parse_arguments()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(mode=True)
    replacement = os.environ.get("DEADPOOL_REPLACEMENT") == "1"
    faulthandler.register(signal.SIGUSR2)  # the test asks where a worker is that makes no progress
    ahead = os.environ.get("DEADPOOL_PREPARING") == "1"  # a spare without a rank: it holds one from its first true step
    device = fake_device() if os.environ.get("FAKE_DEVICE") else None
    tell("prepare" if ahead else "start", replacement=replacement)
    if replacement and args.hold_replacements:
        os.read(os.open(args.flags / "release", os.O_RDONLY), 1)
    job = deadpool.init()
    faults = Faults(args.die, args.flags, torch.distributed.get_rank())
    faults.quiet = job.rehearsing
    astray_kind = args.astray if args.astray_rank in (-1, faults.rank) else ""
    astray.prepare(astray_kind)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    training = LAYOUTS[args.layout](args.ballast_mb)
    faults.hook(training)
    if args.astray:
        astray.remember(training.model)
    faults.reach("setup")
    protected = {"model": training.model, "optimizer": training.optimizer}
    if training.scheduler is not None:
        protected["scheduler"] = training.scheduler
    job.protect(**protected)
    tell("ready", rehearsing=job.rehearsing)

    begun = Attempts()
    for step in job.steps(args.steps):
        rehearsing = job.rehearsing
        if not rehearsing:
            if ahead:
                tell("start", replacement=replacement)
                ahead = False
            recovered = {"replacement": replacement and not begun, "survivor": step.index in begun, None: False}
            if recovered[args.corrupt]:
                spoil(training)
            time.sleep(args.least_ms / 1000)
            first_time = step.index not in begun
            begun.add(step.index)
            # A step lasts until the loop asks for the next one: here, always, is the state of this version.
            tell_state(training, step.index, args.quiet_from)
            holds = args.hold_rank in (faults.rank, -1)
            if step.index == args.hold and first_time and not replacement and holds:
                tell("held", version=step.index)
                os.read(os.open(args.flags / "release", os.O_RDONLY), 1)
            go_ahead(device, step.index)
        faults.begin_step(step.index, rehearsing=rehearsing)
        faults.reach("before")
        if args.astray:
            train = functools.partial(training.step, step.index)
            if not astray.step_of(astray_kind or "count", step, faults.reach, train):
                return
        else:
            with step:
                training.step(step.index)
        faults.reach("after")
        training.between()
        faults.reach("between")
    tell("state", version=args.steps, digest=digest(training))
    tell("device", launches=getattr(device, "launches", 0))
    faults.reach("end")
    tell("end")


if __name__ == "__main__":
    main()
