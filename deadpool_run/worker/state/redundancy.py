"""Ranks that hold the same parameters as this one, according to DTensor and DDP: a hint for placing copies."""

from collections import Counter
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.ids import Rank
from deadpool_run.worker.compat.modules import local
from deadpool_run.worker.state.modules import ModuleState


def replica_leader(modules: Iterable[ModuleState]) -> Rank | None:
    """Return the lowest rank that holds most of this rank's bytes too; None if most are only here."""
    found: Counter[Rank | None] = Counter()
    for module in modules:
        replicated = {id(parameter): ddp for ddp in module.replicated for parameter in ddp.parameters()}
        for _, parameter in module.parameters:
            ranks = holders(parameter, replicated.get(id(parameter)))
            found[min(ranks) if len(ranks) > 1 else None] += local(parameter).nbytes
    return max(found, key=lambda rank: found[rank]) if found else None


def holders(parameter: Tensor, ddp: DistributedDataParallel | None) -> list[Rank]:
    """Return the ranks that hold the same part of a parameter, this one included; none if that is unknown."""
    if isinstance(parameter, DTensor):
        mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
        if coordinate is None:
            return []
        where = (
            slice(None) if placement.is_replicate() else at
            for placement, at in zip(parameter.placements, coordinate, strict=True)
        )
        return [Rank(rank) for rank in mesh.mesh[tuple(where)].flatten().tolist()]
    return [] if ddp is None else [Rank(rank) for rank in dist.get_process_group_ranks(ddp.process_group)]
