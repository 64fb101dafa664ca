"""Data, model, options and digest: what `train.py` and `train_torchrun.py` have in common."""

import argparse
import hashlib

import lightning
import torch
from torch import nn
from torch.utils.data import Dataset


class Waves(Dataset):
    """Points and the sine of their sum: created on access, always the same."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        point = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return point, point.sum().sin().unsqueeze(0)


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(16, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 1)
        )

    def training_step(self, batch, number):
        points, targets = batch
        loss = nn.functional.mse_loss(self.layers(points), targets)
        self.log("loss", loss, on_step=True, on_epoch=True)
        if self.trainer.is_global_zero and number % 8 == 0:
            self.print(f"epoch {self.current_epoch} batch {number} loss {loss.item():.4f}", flush=True)
        return loss

    def validation_step(self, batch, _number):
        points, targets = batch
        self.log("val_loss", nn.functional.mse_loss(self.layers(points), targets), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def options(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--devices", type=int, default=4)
    return parser.parse_args()


def digest(module, optimizer):
    """Return a hash of the weights, the buffers and the optimizer's state."""
    sha = hashlib.sha256()
    moments = [optimizer.state[p][name] for p in module.parameters() for name in ("exp_avg", "exp_avg_sq")]
    for tensor in (*module.state_dict().values(), *moments):
        sha.update(tensor.detach().cpu().numpy().tobytes())
    return sha.hexdigest()
