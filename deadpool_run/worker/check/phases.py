"""The phases of a training step in which `deadpool-run check` kills a rank.

Each function installs hooks that call `die` in its phase. The hooks are installed when the step of the death begins, and
not removed, because the process ends in that step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from deadpool_run.worker.codec import tensors_in
from deadpool_run.worker.compat.modules import DispatchMode, inside_compiled
from deadpool_run.worker.groups.collectives import COLLECTIVES
from deadpool_run.worker.groups.group import Group
from deadpool_run.worker.snapshot.slot_memory import SlotMemory
from deadpool_run.worker.snapshot.writer import StateCapture, Writer

Die = Callable[[], None]

_KERNELS = 12
"""About the number of kernels in a step of an optimizer with foreach kernels."""


def in_forward(die: Die, calls: int) -> None:
    """Die in a forward, before the module after this many, or when the outermost module ends."""
    seen = depth = 0

    def before(module: nn.Module, _args: Any) -> None:
        nonlocal seen, depth
        if torch.is_grad_enabled():
            if seen >= calls or inside_compiled(module) is not None:  # compiled: the hook would recompile it
                die()
            seen += 1
            depth += 1

    def after(_module: nn.Module, _args: Any, _output: Any) -> None:
        nonlocal depth
        if torch.is_grad_enabled():
            depth -= 1
            if depth == 0:
                die()

    hooks.register_module_forward_pre_hook(before)
    hooks.register_module_forward_hook(after)


def in_backward(die: Die, fraction: float) -> None:
    """Die in a backward, after this fraction of the modules' outputs."""
    outputs = reached = 0

    def on_gradient(_gradient: Tensor) -> None:
        nonlocal reached
        reached += 1
        if reached > fraction * (outputs - 1):
            die()

    def after(_module: nn.Module, _args: Any, output: Any) -> None:
        nonlocal outputs
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                outputs += 1
                tensor.register_hook(on_gradient)

    hooks.register_module_forward_hook(after)


def in_collective(die: Die, calls: int) -> None:
    """Die while a collective runs, after this many others."""
    seen = 0

    def watched(issue: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seen
            work = issue(*args, **kwargs)
            if seen >= calls:
                die()
            seen += 1
            return work

        return call

    for collective in COLLECTIVES:
        for name in collective.names:
            if hasattr(Group, name):  # some exist in newer torch only
                setattr(Group, name, watched(getattr(Group, name)))


def in_optimizer(die: Die, fraction: float) -> None:
    """Die between two kernels of an optimizer's step, or after a step with fewer kernels."""
    kernels = _Kernels(die, int(fraction * _KERNELS))

    def before(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        kernels.__enter__()

    def after(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        kernels.__exit__(None, None, None)
        die()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


class _Kernels(DispatchMode):
    """Dies before a kernel."""

    def __init__(self, die: Die, calls: int) -> None:
        super().__init__()
        self._die = die
        self._left = calls

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._left == 0:
            self._die()
        self._left -= 1
        return func(*args, **(kwargs or {}))


def in_capture(die: Die, step: int) -> None:
    """Die in the middle of the copy of this step's result, or of the first copy after it."""
    write, copy = Writer.write, Writer._copy  # noqa: SLF001 - the thread that copies has no hooks of its own
    versions = [-1]

    def noted(self: Writer, memory: SlotMemory, capture: StateCapture) -> bool:
        versions.append(capture.version)
        return write(self, memory, capture)

    def halved(self: Writer, targets: list[Tensor], sources: list[Tensor]) -> None:
        half = len(targets) // 2 if versions[-1] > step else len(targets)
        copy(self, targets[:half], sources[:half])
        if versions[-1] > step:
            die()
        copy(self, targets[half:], sources[half:])

    Writer.write, Writer._copy = noted, halved  # type: ignore[method-assign] # noqa: SLF001 - as above
