"""A regression with a DataLoader, a schedule, a running average and a file of weights: a typical small script."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 10


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    inputs = torch.randn(4096, 32)
    dataset = TensorDataset(inputs, inputs.sin().sum(dim=1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 256), nn.Dropout(0.1), nn.Linear(256, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))

    average = 0.0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for number, (x, y) in enumerate(loader, 1):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            average = 0.9 * average + 0.1 * loss.item()
            if number == len(loader) and rank == 0:
                print(f"epoch {epoch}: average loss {average:.4f}", flush=True)
                torch.save(model.module.state_dict(), "model.pt")


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
