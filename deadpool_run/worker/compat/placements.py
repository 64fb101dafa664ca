"""Placements of DTensors by the names that torch prints, and the private one of FSDP2 over tensor parallelism."""

import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

_SHARD = re.compile(r"S\((\d+)\)")
_STRIDED = re.compile(r"_S\((\d+), (\d+)\)")
"""A dimension that two mesh dimensions shard, in the order of FSDP2 with TP."""


def parse_placements(texts: Iterable[str]) -> list[Placement] | None:
    """Return the placements that torch prints as these texts; None if one of them is neither a shard nor a replica."""
    found: list[Placement] = []
    for text in texts:
        if (placement := _parse(text)) is None:
            return None
        found.append(placement)
    return found


def _parse(text: str) -> Placement | None:
    if text == "R":
        return Replicate()
    if match := _STRIDED.fullmatch(text):
        return _StridedShard(int(match[1]), split_factor=int(match[2]))
    match = _SHARD.fullmatch(text)
    return Shard(int(match[1])) if match else None


def from_shard(
    shard: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """Return the DTensor of this shape and stride whose part on this rank is the shard. Without communication."""
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride))


def has_own_order(tensor: DTensor) -> bool:
    """Return whether the mesh dimensions shard a dimension of the tensor in an order that its placements do not show."""
    spec = tensor._spec  # noqa: SLF001
    order = getattr(spec, "shard_order", None)  # earlier versions have none
    return order is not None and order != spec.compute_default_shard_order(spec.placements)
