"""A regression with a DataLoader, a schedule, a running average and a file of weights: a typical small script."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import deadpool_run as deadpool

EPOCHS = 10


def main():
    job = deadpool.init()
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.Dropout(0.1), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler)

    average = 0.0
    for step, (x, y) in job.batches(loader, epochs=EPOCHS):
        with step:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average = 0.9 * average + 0.1 * loss.item()
            is_last = (step.index + 1) % len(loader) == 0
            if is_last and rank == 0 and not (job.rehearsing or job.interrupted):
                print(f"epoch {step.epoch}: average loss {average:.4f}", flush=True)
                torch.save(model.module.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
