"""Options, data, clipping and digest: what `train.py` and `train_torchrun.py` have in common."""

import argparse
import ctypes
import hashlib

import torch
import torch.distributed as dist
from model import LENGTH, WORDS


def options(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument(
        "--checkpoint-every", type=int, default=0, help="steps between two distributed checkpoints; 0: none"
    )
    parser.add_argument("--checkpoints", default="checkpoints")
    parser.add_argument("--print-every", type=int, default=10)
    return parser.parse_args()


def batch(step, replica, size):
    """Return sequences that count up from random numbers: a pure function of the step and the replica."""
    start = torch.randint(WORDS, (size, 1), generator=torch.Generator().manual_seed(step * 1000 + replica))
    tokens = (start + torch.arange(LENGTH + 1)) % WORDS
    return tokens[:, :-1], tokens[:, 1:]


def clip(parameters, stages, limit=1.0):
    """Clip the gradients by their norm over the whole model: of this stage for each mesh, then over all stages."""
    by_mesh = {}
    for parameter in parameters:
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    norms = [torch.nn.utils.get_total_norm([p.grad for p in of_mesh]).full_tensor() for of_mesh in by_mesh.values()]
    squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares, group=stages)
    for of_mesh in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(of_mesh, limit, squares.sqrt())


def due(args, number):
    """Return whether a checkpoint is written after this step."""
    return args.checkpoint_every and (number + 1) % args.checkpoint_every == 0


def digest(model, optimizer):
    """Return a hash of this rank's part of the weights and of the optimizer's state."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), *(state[name] for name in ("exp_avg", "exp_avg_sq"))):
            local = tensor.to_local().cpu().contiguous()
            sha.update(ctypes.string_at(local.data_ptr(), local.nbytes))
    return sha.hexdigest()
