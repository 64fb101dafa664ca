"""Digests of what a step changes: the trial compares them after two runs of the same step."""

import zlib
from collections.abc import Collection

from deadpool_run.worker.codec import tensors_in
from deadpool_run.worker.snapshot.plan import live_tensors
from deadpool_run.worker.state.digest import digest
from deadpool_run.worker.state.protected import Protected
from deadpool_run.worker.variables.variables import Variables


def digests(protected: Protected, variables: Variables, stepped: Collection[int]) -> dict[str, int]:
    """Return, by name, a digest of each protected tensor and of each optimizer's hyper-parameters.

    So are tensors in protected objects, gradients if they are state, and larger tensors in variables: averages of the weights,
    say. `stepped` are the identities of the optimizers that have updated.
    """
    live = live_tensors(protected)
    names = {id(tracked.tensor): name for name, tracked in live.items()}
    found = {name: digest(tensor) for name, tensor in variables.tensors() if id(tensor) not in names}
    found |= {name: digest(tracked.tensor) for name, tracked in live.items()}
    for module in protected.modules.values():  # the references are those of the last snapshot
        found |= {name: digest(tensor) for name, tensor in module.exchanged()}
    for parameter, gradient, _ in protected.gradients(stepped):
        found[f"the gradient of {names[id(parameter)]}"] = digest(gradient)
    for name, obj in protected.objects.items():
        found |= {f"tensor {at} of {name}": digest(tensor) for at, tensor in enumerate(tensors_in(obj.state_dict()))}
    for name, optimizer in protected.optimizers.items():
        found[f"the hyper-parameters of {name}"] = zlib.crc32(repr(optimizer.take()).encode())
    return found
