"""A small GPT over bytes, and real text that every Python installation has: the sources of its standard library."""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

BYTES = 256


@dataclass(frozen=True)
class Size:
    """Shape of the model and of a batch: in each step, each rank takes `batch` sequences of `context` bytes."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int


SIZES = {
    "tiny": Size(layers=2, heads=2, width=64, context=32, batch=4),  # 0.1 M parameters: a step of milliseconds
    "small": Size(layers=4, heads=4, width=256, context=128, batch=16),  # 3.3 M: about a second on one CPU core
    "medium": Size(layers=8, heads=8, width=512, context=256, batch=8),  # 25 M: for a GPU
}


class Block(nn.Module):
    """Pre-norm attention and feed-forward. Input and output: (batch, context, width)."""

    def __init__(self, size, dropout):
        super().__init__()
        self.heads = size.heads
        self.norm_attention = nn.LayerNorm(size.width)
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.norm_feed = nn.LayerNorm(size.width)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        batch, context, width = x.shape
        heads = self.qkv(self.norm_attention(x)).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, context, width)))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm_feed(x)))))


class GPT(nn.Module):
    """Input: bytes, (batch, context) of int64. Output: logits of the next byte, (batch, context, 256)."""

    def __init__(self, size, dropout=0.1):
        super().__init__()
        self.byte = nn.Embedding(BYTES, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size, dropout) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)

    def forward(self, tokens):
        x = self.byte(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def standard_library(limit_bytes=2_000_000):
    """Return the source of Python's top-level modules, in the order of their names, as uint8; at most this many bytes."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)


def batch_of(text, size, step, rank, device):
    """Return inputs and targets, (batch, context) each: a pure function of (step, rank), so any step can be repeated."""
    generator = torch.Generator().manual_seed(step * 100_003 + rank)
    starts = torch.randint(len(text) - size.context - 1, (size.batch, 1), generator=generator)
    window = text[starts + torch.arange(size.context + 1)].long().to(device)
    return window[:, :-1], window[:, 1:]
