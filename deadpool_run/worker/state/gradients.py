"""Gradients that outlive a step, because a script accumulates them over several steps.

Usually there are none: the next step drops gradients that an optimizer has used. A gradient is state if no optimizer with
its parameter has updated since it was last written to. `left_gradients` is about the others.
"""

import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from deadpool_run.errors import ScriptError, SnapshotError
from deadpool_run.worker.compat import fsdp
from deadpool_run.worker.compat import modules as compat_nn
from deadpool_run.worker.state.left_gradients import LeftGradients


class Kept(NamedTuple):
    """A parameter, a copy of its gradient, and whether that lies in a bucket of DDP's."""

    parameter: Tensor
    gradient: Tensor
    in_bucket: bool


class UsedGradients:
    """Gradients that updates have used up: until they are written to again, they are no state."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """By parameter. Weak, because a later gradient may have the identity of one that was freed."""

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Note that the gradients of these parameters were used up."""
        for parameter in parameters:
            if parameter.grad is not None:
                self._marks[id(parameter)] = weakref.ref(parameter.grad), _writes(parameter.grad)

    def __contains__(self, parameter: Tensor) -> bool:
        gradient, mark = parameter.grad, self._marks.get(id(parameter))
        if gradient is None or mark is None:
            return False
        return mark[0]() is gradient and mark[1] == _writes(gradient)


def _writes(gradient: Tensor) -> int:
    return compat_nn.writes_of(compat_nn.local(gradient))


class BucketViews:
    """The memory in which DDPs with `gradient_as_bucket_view` keep each gradient.

    A restored gradient has to go there if it was there, and only then. DDP multiplies a gradient elsewhere by 1/n as it copies
    it, but divides one in place by n: for three ranks the last bit may differ. Gradients are elsewhere after a backward under
    `no_sync()` that found none.
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
        self._note(parameter for group in optimizer.param_groups for parameter in group["params"])
        self._noted.add(id(optimizer))

    @contextmanager
    def finding(self, ddp: DistributedDataParallel) -> Iterator[None]:
        """Find the memory while DDP decides its buckets: it moves every gradient into its bucket then."""
        parameters = [each for each in ddp.parameters() if each.requires_grad] if ddp.gradient_as_bucket_view else []
        without = [parameter for parameter in parameters if parameter.grad is None]
        for parameter in without:  # one element in memory, whatever the shape
            parameter.grad = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        try:
            yield
            if compat_nn.has_buckets(ddp):
                self._note(parameters)
        finally:
            for parameter in without:
                parameter.grad = None

    def _note(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None and compat_nn.is_view(parameter.grad):
                self._views[id(parameter)] = parameter.grad

    def holds(self, parameter: Tensor) -> bool:
        """Return whether a parameter's gradient lies in a bucket."""
        view, gradient = self._views.get(id(parameter)), parameter.grad
        return view is not None and gradient is not None and view.data_ptr() == gradient.data_ptr()

    def take(self, parameters: Iterable[Tensor], ddps: Collection[DistributedDataParallel]) -> list[Kept]:
        """Return each parameter that has a gradient, with a copy of that. Raises `ScriptError` for sparse ones."""
        found = [parameter for parameter in parameters if parameter.grad is not None]
        if any(ddp.gradient_as_bucket_view for ddp in ddps):
            self._note(found)
        for parameter in found:
            if parameter.grad is not None and parameter.grad.layout is not torch.strided:
                raise ScriptError(
                    f"a step ended with a sparse gradient of shape {list(parameter.shape)} that no optimizer had used, and no snapshot "
                    "holds those.\nUpdate in the step that computes it, or have dense gradients (sparse=False)."
                )
        return [
            Kept(parameter, parameter.grad.detach().clone(), self.holds(parameter))
            for parameter in found
            if parameter.grad is not None
        ]

    def restore(self, kept: Iterable[Kept]) -> None:
        """Give each of these parameters its memory in the bucket, or none if the gradient was elsewhere.

        Raises `SnapshotError` if the memory is not known, because DDP has not used it in this process.
        """
        for parameter, _, in_bucket in kept:
            if in_bucket == self.holds(parameter):
                continue
            if in_bucket and id(parameter) not in self._views:
                raise SnapshotError(
                    "a gradient of the snapshot lies in a bucket of DDP's (gradient_as_bucket_view=True), and this process, "
                    "which has run fewer steps, does not know where.\nPut all micro-batches of an update into one step."
                )
            parameter.grad = self._views[id(parameter)] if in_bucket else None


def put(
    parameters: Mapping[str, Tensor],
    kept: Iterable[Kept],
    without: Collection[int],
    lost: Collection[int] | None,
    left: LeftGradients,
) -> None:
    """Set the kept gradients. `without` and `lost` are identities of parameters.

    Those `without` had no gradient. Those that are `lost`, or all others if that is None, get stand-ins. The rest had zeros.
    """
    values = {id(parameter): gradient for parameter, gradient, _ in kept}
    for name, parameter in parameters.items():
        gradient = values.get(id(parameter))
        if gradient is not None and parameter.grad is not None and parameter.grad.shape == gradient.shape:
            parameter.grad.copy_(gradient)  # in place: it may be a view of a bucket of DDP's
        elif gradient is not None:
            parameter.grad = gradient.clone()
        elif id(parameter) in without:
            parameter.grad = None
        elif lost is None or id(parameter) in lost:
            left.lose(parameter, name)
        elif parameter.grad is not None:
            left.zero(parameter.grad)


def refuse_gathered(modules: Collection[FSDPModule]) -> None:
    """Raise `ScriptError` if a step ends with gradients that FSDP2 has not reduced: no snapshot holds them."""
    if any(map(fsdp.has_gradients, modules)):
        raise ScriptError(
            "a step ended with gradients that FSDP2 has not reduced (set_requires_gradient_sync(False)), and no snapshot holds "
            "those.\nPut all micro-batches up to the reduced one into one step."
        )
