"""Gradients that outlive a step, because a script accumulates them over several steps.

Usually there are none: the next step drops gradients that an optimizer has used. A gradient is state if no optimizer with
its parameter has updated in the step.
"""

from collections.abc import Collection, Iterable

from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from deadpool_run.errors import ScriptError
from deadpool_run.worker.compat import fsdp
from deadpool_run.worker.compat import modules as compat_nn
from deadpool_run.worker.state.optimizers import OptimizerState


class BucketViews:
    """The memory in which DDPs with `gradient_as_bucket_view` keep each gradient.

    A restored gradient has to go there. DDP multiplies a gradient elsewhere by 1/n as it copies it, but divides one in place
    by n: for three ranks the last bit may differ.
    """

    def __init__(self) -> None:
        self._views: dict[int, Tensor] = {}
        self._noted: set[int] = set()

    def note(self, optimizer: Optimizer, ddps: Iterable[DistributedDataParallel]) -> None:
        """Note, once, the gradients of an optimizer that is about to update: decided buckets don't move."""
        if id(optimizer) in self._noted:
            return
        decided = [compat_nn.has_buckets(ddp) for ddp in ddps if ddp.gradient_as_bucket_view]
        if not decided or not all(decided):
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._views |= {id(each): each.grad for each in parameters if each.grad is not None}
        self._noted.add(id(optimizer))

    def restore(self, kept: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Give each of these parameters that has no gradient its memory in the bucket."""
        for parameter, _ in kept:
            if parameter.grad is None:
                parameter.grad = self._views.get(id(parameter))


def take(
    parameters: Iterable[Tensor], optimizers: Collection[OptimizerState], stepped: Collection[int]
) -> list[tuple[Tensor, Tensor]]:
    """Return each parameter whose gradient is state, with a copy of the gradient; `stepped` as in `Protected.take`.

    `parameters` are those of the modules; they count only without optimizers.
    """
    idle = [optimizer for optimizer in optimizers if id(optimizer.optimizer) not in stepped]
    if not idle and (optimizers or stepped):  # the usual case, and this runs at the end of each step
        return []
    if optimizers:
        parameters = (parameter for optimizer in idle for _, parameter in optimizer.parameters())
    used = {id(each) for optimizer in optimizers if optimizer not in idle for _, each in optimizer.parameters()}
    found = {id(parameter): parameter for parameter in parameters if id(parameter) not in used}
    return [(parameter, parameter.grad.detach().clone()) for parameter in found.values() if parameter.grad is not None]


def put(parameters: Iterable[Tensor], kept: Iterable[tuple[Tensor, Tensor]], *, zeroed: bool) -> None:
    """Set the gradients that `take` returned, and drop all others; with `zeroed`, zero them instead."""
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


def refuse_gathered(modules: Collection[FSDPModule]) -> None:
    """Raise `ScriptError` if a step ends with gradients that FSDP2 has not reduced: no snapshot holds them."""
    if any(map(fsdp.has_gradients, modules)):
        raise ScriptError(
            "a step ended with gradients that FSDP2 has not reduced (set_requires_gradient_sync(False)), and no snapshot holds "
            "those.\nPut all micro-batches up to the reduced one into one step."
        )
