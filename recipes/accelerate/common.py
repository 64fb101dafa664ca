"""Data, options and digest: what `train.py` and `train_torchrun.py` have in common."""

import argparse
import hashlib

import torch
from torch.utils.data import Dataset


class Sequences(Dataset):
    """Sequences that count up from a random number: created on access, always the same."""

    def __init__(self, count, length=32, words=64):
        self.count, self.length, self.words = count, length, words

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        start = torch.randint(self.words, (1,), generator=torch.Generator().manual_seed(index))
        return (start + torch.arange(self.length)) % self.words


def options(description):
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--print-every", type=int, default=20)
    return parser.parse_args()


def digest(model, optimizer):
    """Return a hash of the weights and of the optimizer's state."""
    sha = hashlib.sha256()
    for parameter in model.parameters():
        for tensor in (parameter, *(optimizer.state[parameter][name] for name in ("exp_avg", "exp_avg_sq"))):
            sha.update(tensor.detach().cpu().numpy().tobytes())
    return sha.hexdigest()
