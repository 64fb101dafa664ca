"""Makes tensors that consist of others, from their forms in a snapshot. Their parts have no values yet."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from deadpool_run.errors import SnapshotError
from deadpool_run.worker.codec import class_of_name
from deadpool_run.worker.compat.modules import local
from deadpool_run.worker.compat.placements import from_shard, parse_placements
from deadpool_run.worker.snapshot.slot_memory import dtype_of


def made_of(form: dict[str, Any], like: Tensor) -> Tensor:
    """Return a tensor of a form, on the device and the mesh of `like`. Raises `SnapshotError` if it cannot be made here."""
    made = _local(form, local(like).device)
    whole = form.get("shard_of")
    return made if whole is None else distributed(made, like, **whole)


def distributed(
    shard: Tensor, like: Tensor, *, placements: Sequence[str], shape: Sequence[int], stride: Sequence[int]
) -> DTensor:
    """Return the DTensor of this shard, on the mesh of `like`. Raises `SnapshotError` if it cannot be made here."""
    if not isinstance(like, DTensor):
        raise SnapshotError(f"a value of the snapshot has the placements {placements}, the live one has none")
    is_alike = [*map(str, like.placements)] == [*placements]
    found = like.placements if is_alike else parse_placements(placements)
    if found is None:
        raise SnapshotError(f"a value of the snapshot cannot be created with the placements {placements}")
    return from_shard(shard, like.device_mesh, found, shape, stride)


def _local(form: dict[str, Any], device: torch.device) -> Tensor:
    if "class" not in form:
        where = device if form["device"] == device.type else torch.device(form["device"])
        return torch.empty_strided(form["shape"], form["stride"], dtype=dtype_of(form["dtype"]), device=where)
    module, name = form["class"]
    kind = class_of_name(module, name)
    if not (isinstance(kind, type) and issubclass(kind, Tensor) and hasattr(kind, "__tensor_unflatten__")):
        raise SnapshotError(
            f"an optimizer's state has tensors of the class {module}.{name}, which this process does not have.\n"
            "Import it before job.protect()."
        )
    parts = {key: _local(part, device) for key, part in form["parts"].items()}
    made: Tensor = kind.__tensor_unflatten__(parts, form["context"], torch.Size(form["shape"]), tuple(form["stride"]))
    return made
