"""Parts of the comparison's cases: names, contributions of ranks, and outcomes.

A case is called on every rank and returns tensors or plain values. Its outcome is what it returned, bit for bit, or what it
raised. Where only one rank may make a mistake, the others do not call: Gloo would let them wait for it.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed._functional_collectives import AsyncCollectiveTensor


@dataclass(frozen=True)
class Case:
    """One row of the comparison: `section` and `name` are what the documentation calls it."""

    section: str
    name: str
    run: Callable[[int, int], object]


CASES: list[Case] = []


def case(section, name=None):
    def add(function):
        CASES.append(Case(section, name or function.__name__.replace("_", " "), function))
        return function

    return add


def mine(rank, *shape, dtype=torch.float32):
    """A rank's contribution: small whole numbers that differ between ranks."""
    values = (torch.arange(math.prod(shape)) % 7 + 3 * rank + 1).view(shape)
    if dtype is torch.bool:
        return values % 2 == 0
    if dtype.is_complex:
        return torch.complex(values.double(), -values.double() / 2).to(dtype)
    return values.to(dtype)


def blank(*shape, dtype=torch.float32):
    """Where a collective writes: something that nobody sends."""
    return torch.full(shape, True if dtype is torch.bool else 99, dtype=torch.float32).to(dtype)


_VARYING = re.compile(
    r"<torch[\w.]* object at \w+>|<deadpool group [^>]*>|\d+(\.\d+){3}|0x[0-9a-f]+|(?<=:)\d{4,5}\b|(?<=GroupName: )\S+|at \w+"
    r"|(?<=Timed out waiting )\d+(?=ms)"
)
"""Parts of messages that differ from run to run: addresses, names, and how much of its time a call of Gloo's had left."""


def outcome(function):
    """The outcome of a call: ("gives", value) or ("raises", type, message without addresses and the C++ stack)."""
    try:
        return "gives", canonical(function())
    except Exception as error:  # noqa: BLE001 - the kind is what is compared
        text = str(error).partition("\nException raised from")[0]
        return "raises", type(error).__name__, _VARYING.sub("#", text)[:400]


def canonical(value):
    """A value that compares bit for bit and travels between processes."""
    if isinstance(value, AsyncCollectiveTensor):
        value = funcol.wait_tensor(value)
    if isinstance(value, torch.Tensor):
        if value.is_sparse:
            value = value.coalesce()
            return "sparse", canonical(value.indices()), canonical(value.values())
        plain = torch.view_as_real(value.detach()) if value.is_complex() else value.detach()
        raw = plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return "tensor", str(value.dtype), tuple(value.shape), hashlib.sha256(raw).hexdigest() if raw[64:] else raw
    if isinstance(value, (list, tuple)):
        return tuple(canonical(part) for part in value)
    if isinstance(value, dict):
        return {key: canonical(part) for key, part in value.items()}
    return value
