"""Makes tensors that consist of others, from their forms in a snapshot. Their parts have no values yet."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from deadpool_run.errors import SnapshotError
from deadpool_run.worker.compat.modules import local
from deadpool_run.worker.compat.placements import from_shard, parse_placements
from deadpool_run.worker.snapshot.slot_memory import dtype_of
from deadpool_run.worker.variables.values.objects import class_of_name


def made_of(form: dict[str, Any], like: Tensor) -> Tensor:
    """Return a tensor of a form, on the device and the mesh of `like`. Raises `SnapshotError` if it cannot be made here."""
    made = _local(form, local(like).device)
    if (whole := form.get("shard_of")) is None:
        return made
    placements = parse_placements(whole["placements"])
    if placements is None or not isinstance(like, DTensor):
        raise SnapshotError(f"a {form['class'][1]} cannot be created with the placements {whole['placements']}")
    return from_shard(made, like.device_mesh, placements, whole["shape"], whole["stride"])


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
