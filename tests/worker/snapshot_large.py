"""A model of 12 MiB of state and a worker that trains it, for tests that kill the worker during a copy."""

import torch
from snapshot_kit import given, raw
from torch import nn

ELEMENTS = 1 << 20
"""Of the large parameter: a snapshot has three times 4 MiB, whose copy takes milliseconds."""


class Large:
    """A model whose every version can be computed again, without any step but its own."""

    def __init__(self):
        self.model = nn.ParameterDict({"small": torch.zeros(3), "large": torch.arange(ELEMENTS) / ELEMENTS})
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.version = 0

    def step(self):
        self.version += 1
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, (self.version * 0.37) % 1 - 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tensors(self):
        """The bytes of every tensor by its name in a snapshot."""
        found = {}
        for key, parameter in self.model.items():
            found[f"model/{key}"] = raw(parameter)
            for name, value in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer/model/{key}/{name}"] = raw(value)
        return found


def trains_for_ever(gift):
    large = Large()
    _, snapshots = given(gift)
    snapshots.protect("model", large.model)
    snapshots.protect("optimizer", large.optimizer)
    snapshots.capture_now(0)
    while True:
        snapshots.wait()
        large.step()
        snapshots.begin(large.version)
