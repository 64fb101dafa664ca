"""DTensors without gradients, such as an average of weights under FSDP2: their shard, mesh and placements.

Another process of the rank finds the mesh by the name of a protected parameter.
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from deadpool_run.worker.compat.modules import local
from deadpool_run.worker.compat.placements import from_shard, has_own_order, parse_placements
from deadpool_run.worker.variables.values.objects import OpaqueError

TAG = "distributed"


def mesh_of(value: Any) -> Any:
    """Return the device mesh of a DTensor; None for any other value."""
    return value.device_mesh if type(value) is DTensor else None


def parts_of(value: Any) -> tuple[Tensor, list[Any]] | None:
    """Return the shard of a DTensor, with its shape, steps and placements; None for one that `of_parts` cannot make."""
    if type(value) is not DTensor or value.requires_grad or isinstance(value, nn.Parameter):
        return None
    placements = list(map(str, value.placements))
    if parse_placements(placements) is None or has_own_order(value):
        return None
    return local(value), [list(value.shape), list(value.stride()), placements]


def of_parts(shard: Tensor, mesh: Any, layout: list[Any], into: Any) -> Any:
    """Return the DTensor of a shard: `into` if it has that. Raises `OpaqueError` if this process has no such mesh."""
    if mesh is None:
        raise OpaqueError
    if mesh_of(into) == mesh and local(into) is shard and (parts := parts_of(into)) is not None and parts[1] == layout:
        return into
    shape, stride, names = layout
    placements = parse_placements(names)
    assert placements is not None, names  # `parts_of` has parsed them
    return from_shard(shard, mesh, placements, shape, stride)
