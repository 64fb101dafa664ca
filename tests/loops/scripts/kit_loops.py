"""Parts of the items: loops, models, data and steps."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH = 24
BATCH = 6
ITEMS: dict[str, Callable[[int, int], "Loop"]] = {}


def _nothing(_index):
    return None


def _plain(job, total):
    return ((step,) for step in job.steps(total))


@dataclass
class Loop:
    """A training loop. `blocks` are the modules and `optimizer` the optimizer that deaths can hook."""

    protect: dict[str, Any]
    step: Callable[..., None]
    blocks: list[nn.Module]
    optimizer: torch.optim.Optimizer
    between: Callable[[int], None] = _nothing
    steps: Callable[[Any, int], Iterator[Any]] = _plain
    told: Callable[[Any, Any], Any] = lambda _step, batch: batch
    watched: dict[str, Any] = field(default_factory=dict)
    """Objects that must be restored although they are not protected by name."""
    grads: bool = False
    """Whether gradients are kept after a step."""


def item(name):
    """Register an item of the matrix: a function of rank and world size that returns a `Loop`."""

    def put(function):
        ITEMS[name] = function
        return function

    return put


class Block(nn.Module):
    def __init__(self, width=WIDTH, inner=2 * WIDTH):
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def seeded(make):
    """Return the result of `make`, equal on all ranks, without a change to the generators."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        return make()


def net(blocks=3, **sizes):
    return seeded(lambda: nn.Sequential(*(Block(**sizes) for _ in range(blocks))))


def ddp(model, **options):
    return DistributedDataParallel(model, **{"bucket_cap_mb": 0.01, **options})


def data(index, rank, width=WIDTH):
    """Return the inputs of a rank in a step. They depend on nothing else."""
    return torch.randn(BATCH, width, generator=torch.Generator().manual_seed(1000 * index + rank))


def blocks_of(model, kind=Block):
    return [module for module in model.modules() if isinstance(module, kind)]


def update(model, optimizer, rank, *, before=None):
    """Return the usual step. `before` is called between backward and the optimizer."""

    def step(index):
        model(data(index, rank)).pow(2).mean().backward()
        if before is not None:
            before(index)
        optimizer.step()
        optimizer.zero_grad()

    return step


def adam(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)
