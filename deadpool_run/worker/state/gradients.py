"""Gradients that outlive a step, where a script accumulates them over several steps before an optimizer uses them.

Mostly nothing is kept: what an optimizer has used in a step is dropped by the next one. Gradients are state where no
optimizer that holds their parameters has updated in the step.
"""

from collections.abc import Collection, Iterable
from typing import Protocol

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from deadpool_run.errors import ScriptError
from deadpool_run.worker.compat import fsdp
from deadpool_run.worker.compat import modules as compat_nn
from deadpool_run.worker.state.optimizers import OptimizerState


class BucketViews:
    """Where DDPs with `gradient_as_bucket_view` keep each gradient.

    A gradient that is put back goes there. One that lies elsewhere DDP multiplies by 1/n as it copies it, while it divides by n
    in place: for three ranks the last bit may differ.
    """

    def __init__(self) -> None:
        self._views: dict[int, Tensor] = {}
        self._noted: set[int] = set()

    def note(self, optimizer: Optimizer, ddps: Iterable[DistributedDataParallel]) -> None:
        """Note the gradients that an optimizer is about to use, once: after the buckets are decided they do not move."""
        if id(optimizer) in self._noted:
            return
        decided = [compat_nn.has_buckets(ddp) for ddp in ddps if ddp.gradient_as_bucket_view]
        if not decided or not all(decided):
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._views |= {id(each): each.grad for each in parameters if each.grad is not None}
        self._noted.add(id(optimizer))

    def lend(self, kept: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Give parameters that have no gradient, and are to get one, the memory that it had in its bucket."""
        for parameter, _ in kept:
            if parameter.grad is None:
                parameter.grad = self._views.get(id(parameter))


class _Module(Protocol):
    parameters: list[tuple[str, nn.Parameter]]


def take(
    modules: Iterable[_Module], optimizers: Collection[OptimizerState], stepped: Collection[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter whose gradient is state, with a copy of that; `stepped` as in `Protected.take`."""
    idle = [optimizer for optimizer in optimizers if id(optimizer.optimizer) not in stepped]
    if not idle and (optimizers or stepped):
        return []
    found: dict[int, Tensor]
    if not optimizers:
        found = {id(parameter): parameter for module in modules for _, parameter in module.parameters}
    else:
        found = {id(parameter): parameter for optimizer in idle for _, parameter in optimizer.parameters()}
    for optimizer in optimizers:
        if id(optimizer.optimizer) in stepped:
            for _, parameter in optimizer.parameters():
                found.pop(id(parameter), None)
    return [(parameter, parameter.grad.detach().clone()) for parameter in found.values() if parameter.grad is not None]


def put(parameters: Iterable[Tensor], kept: Iterable[tuple[Tensor, Tensor]], *, zeroed: bool) -> None:
    """Give parameters the gradients that `take` returned, and all others none; with `zeroed` theirs become zero."""
    values = {id(parameter): gradient for parameter, gradient in kept}
    for parameter in parameters:
        gradient = values.get(id(parameter))
        if gradient is not None and parameter.grad is not None and parameter.grad.shape == gradient.shape:
            parameter.grad.copy_(gradient)  # in place: it may be a view of a bucket of DDP's
        elif gradient is not None:
            parameter.grad = gradient.clone()
        elif parameter.grad is not None and zeroed:
            parameter.grad.zero_()
        else:
            parameter.grad = None


def drop_gathered(modules: Iterable[FSDPModule]) -> None:
    """Forget gradients that FSDP2 holds back: an interrupted step's would be added to the next one's."""
    for module in modules:
        fsdp.drop_gradients(module)


def refuse_gathered(modules: Collection[FSDPModule]) -> None:
    """Raise `ScriptError` if FSDP2 holds back gradients at the end of a step: they are in no snapshot."""
    if any(map(fsdp.has_gradients, modules)):
        raise ScriptError(
            "a step ended with gradients that FSDP2 holds back unreduced (set_requires_gradient_sync(False)), which no "
            "snapshot holds.\nLet one step be all micro-batches up to the one that is reduced."
        )
