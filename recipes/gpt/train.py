"""Train a small GPT on bytes of real text: under python, torchrun or deadpool-run, with DDP, FSDP2 or HSDP."""

import argparse
import ctypes
import hashlib
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from model import GPT, SIZES, batch_of, standard_library
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import deadpool_run as deadpool


def options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parallel", choices=("ddp", "fsdp2", "hsdp"), default="ddp")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny")
    parser.add_argument("--batch", type=int, help="sequences of each rank in a step; default: those of --size")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--print-every", type=int, default=20)
    parser.add_argument("--digest-dir", type=Path, help="write each rank's final digest to DIR/rankN")
    parser.add_argument("--step-log", type=Path, help="append 'step monotonic-ns pid' of each step to DIR/rankN")
    return parser.parse_args()


def build(job, args, size):
    """Return the model, in parallel form, with its optimizer and learning-rate schedule."""
    torch.manual_seed(0)  # the same weights everywhere
    model = GPT(size).to(job.device)
    if args.parallel == "ddp":
        model = DistributedDataParallel(model)
    else:
        shape = {"shards": job.world_size} if args.parallel == "fsdp2" else {"copies": 2, "shards": job.world_size // 2}
        mesh = init_device_mesh(job.device.type, tuple(shape.values()), mesh_dim_names=tuple(shape))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    torch.manual_seed(1 + job.rank)  # different dropout on each rank
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    return model, optimizer, scheduler


def digest(model, optimizer):
    """Return the SHA-256 of this rank's part of the weights and of the optimizer's state."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        for tensor in (parameter.detach(), *(state[name] for name in sorted(state))):
            local = (tensor.to_local() if hasattr(tensor, "to_local") else tensor).cpu().contiguous()
            sha.update(ctypes.string_at(local.data_ptr(), local.nbytes))  # torch comes without numpy
    return sha.hexdigest()


class Recorder:
    """Prints loss and speed on rank 0 and logs each step if asked, but not while a replacement rehearses."""

    def __init__(self, job, args, tokens):
        self.job, self.args, self.tokens = job, args, tokens
        self.since, self.steps = time.monotonic(), 0
        self.log = None
        if args.step_log:
            self.log = os.open(args.step_log / f"rank{job.rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def completed(self, step, loss):
        if self.job.rehearsing:
            return
        if self.log is not None:
            os.write(self.log, b"%d %d %d\n" % (step, time.monotonic_ns(), os.getpid()))
        self.steps += 1
        if self.job.rank == 0 and (step + 1) % self.args.print_every == 0:
            now = time.monotonic()
            speed = self.steps * self.tokens / (now - self.since)
            print(f"step {step + 1:5d}  loss {loss.item():.4f}  {speed:9,.0f} tokens/s", flush=True)
            self.since, self.steps = now, 0


def main():
    args = options()
    size = replace(SIZES[args.size], batch=args.batch or SIZES[args.size].batch)
    for folder in filter(None, (args.digest_dir, args.step_log)):
        folder.mkdir(parents=True, exist_ok=True)  # now: an error after the last step would be late
    torch.use_deterministic_algorithms(mode=True)
    job = deadpool.init()
    text = standard_library()
    model, optimizer, scheduler = build(job, args, size)
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    recorder = Recorder(job, args, size.batch * size.context * job.world_size)

    for step in job.steps(args.steps):
        with step:
            inputs, targets = batch_of(text, size, step.index, job.rank, job.device)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            recorder.completed(step.index, loss)

    result = digest(model, optimizer)
    print(f"digest rank {job.rank} {result}", flush=True)
    if args.digest_dir:
        (args.digest_dir / f"rank{job.rank}").write_text(result + "\n")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(): a model that outlives its group can hang in its destructor
