"""A small transformer, cut into pipeline stages, with tensor-parallel blocks and sharded data parallelism."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

WORDS, LENGTH, WIDTH, HEADS, LAYERS = 64, 32, 64, 4, 4


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        heads = [
            f(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for f in (self.query, self.key, self.value)
        ]
        y = functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.norm2 = nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(functional.silu(self.up(self.norm2(x))))


class Stage(nn.Module):
    """The layers of one pipeline stage. Layers have their numbers in the whole model, also in checkpoints."""

    def __init__(self, index, stages):
        super().__init__()
        per_stage = LAYERS // stages
        self.words = nn.Embedding(WORDS, WIDTH) if index == 0 else None
        self.layers = nn.ModuleDict({str(n): Block() for n in range(index * per_stage, (index + 1) * per_stage)})
        last = index == stages - 1
        self.norm, self.output = (nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)) if last else (None, None)

    def forward(self, x):
        x = x if self.words is None else self.words(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.output is None else self.output(self.norm(x))


def build(index, stages, mesh):
    """Return a pipeline stage, parallel over `tp` and `dp`. The mesh does not change the weights."""
    stage = Stage(index, stages)
    for name, parameter in stage.named_parameters():
        generator = torch.Generator().manual_seed(sum(name.encode()))
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.05, generator=generator)
    for layer in stage.layers.values():
        parallelize_module(
            layer,
            mesh["tp"],
            {
                "norm1": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
                "attention.query": ColwiseParallel(),
                "attention.key": ColwiseParallel(),
                "attention.value": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "norm2": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )
        fully_shard(layer, mesh=mesh["dp"])
    # Between blocks, and in what stages send to each other, each tp rank has its part of the sequence.
    ends = {}
    if stage.words is not None:
        ends["words"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    if stage.output is not None:
        ends["norm"] = SequenceParallel()
        ends["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(stage, mesh["tp"], ends)
    return fully_shard(stage, mesh=mesh["dp"])
