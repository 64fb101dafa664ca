"""Placements of DTensors by the names that torch prints, and the private one of FSDP2 over tensor parallelism."""

import re

from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

_SHARD = re.compile(r"S\((\d+)\)")
_STRIDED = re.compile(r"_S\((\d+), (\d+)\)")
"""A dimension that two mesh dimensions shard, in the order of FSDP2 with TP."""


def parse_placement(text: str) -> Placement | None:
    """Return the placement that torch prints as `text`; None if it is neither a shard nor a replica."""
    if text == "R":
        return Replicate()
    if match := _STRIDED.fullmatch(text):
        return _StridedShard(int(match[1]), split_factor=int(match[2]))
    match = _SHARD.fullmatch(text)
    return Shard(int(match[1])) if match else None


def has_own_order(tensor: DTensor) -> bool:
    """Return whether the mesh dimensions shard a dimension of the tensor in an order that its placements do not show."""
    spec = tensor._spec  # noqa: SLF001
    order = getattr(spec, "shard_order", None)  # earlier versions have none
    return order is not None and order != spec.compute_default_shard_order(spec.placements)
