"""recipes/gpt as a torchrun user makes it fault-tolerant: a checkpoint after each step, loaded at the start.

The model, the data and the step log are the recipe's. It uses DDP only, and rank 0 writes the checkpoints.
"""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes" / "gpt"))

import torch
import torch.distributed as dist
from model import SIZES, batch_of, standard_library
from torch.nn import functional
from train import Recorder, build, digest, options


def main():
    args = options()
    size = replace(SIZES[args.size], batch=args.batch or SIZES[args.size].batch)
    checkpoint = args.step_log.parent / "checkpoint.pt"
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    job = SimpleNamespace(rank=rank, world_size=world_size, device=torch.device("cpu"), rehearsing=False)
    text = standard_library()
    parts = build(job, args, size)
    model, optimizer, scheduler = parts
    start = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        start = saved["step"]
        for part, state in zip(parts, saved["parts"], strict=True):
            part.load_state_dict(state)
    recorder = Recorder(job, args, size.batch * size.context * world_size)
    for step in range(start, args.steps):
        inputs, targets = batch_of(text, size, step, rank, job.device)
        loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if rank == 0:
            half = checkpoint.with_suffix(".half")
            torch.save({"step": step + 1, "parts": [part.state_dict() for part in parts]}, half)
            half.replace(checkpoint)
        recorder.completed(step, loss)
    (args.digest_dir / f"rank{rank}").write_text(digest(model, optimizer) + "\n")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(): a model without its group can hang in its destructor
