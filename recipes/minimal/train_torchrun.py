"""A small network, trained with DistributedDataParallel."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 20_000


def batch(step, rank):
    """Return the inputs and targets of this step and rank: a pure function of both, so any step can be repeated."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    inputs = torch.randn(64, 32, generator=generator)
    return inputs, inputs.sin().sum(dim=1, keepdim=True)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    for step in range(STEPS):
        inputs, targets = batch(step, rank)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 300 == 0:
            print(f"loss {loss.item():.6f}", flush=True)
    total = sum(parameter.double().sum().item() for parameter in model.parameters())
    print(f"rank {rank}: the weights sum to {total:.12f} after {STEPS} steps", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # after main(): a model that outlives its group can hang in its destructor
