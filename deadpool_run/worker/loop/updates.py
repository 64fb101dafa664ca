"""Optimizer updates in each step, as torch's hooks report them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from deadpool_run.errors import InterruptedUpdateError, ScriptError
from deadpool_run.worker.compat import c10d, scalers
from deadpool_run.worker.compat.modules import local

OUTSIDE_LOOP = (
    "this script updates weights outside of job.steps(): nothing protects it, and a lost rank restarts it from the beginning.\n"
    "Write `for step in job.steps(N):` and `with step:` around the step."
)
_OUTSIDE = 3
"""This many updates before the step loop are a loop of the script's own; one or two may be a warm-up."""


def refuse_captured(optimizer: Optimizer) -> None:
    """Raise `ScriptError` while a CUDA graph is captured: its replay would change weights while a snapshot copies them, unseen."""
    if torch.cuda.is_initialized() and c10d.is_capturing():
        raise ScriptError(
            f"{type(optimizer).__name__}.step() was called while a CUDA graph is captured: a replay would change the weights "
            "without a call of the optimizer, which a snapshot has to see.\nCapture forward and backward only."
        )


def first_gradient(optimizer: Optimizer) -> list[Tensor]:
    """Return this rank's part of the first gradient that an optimizer is about to use, if there is one."""
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    return [local(each) for each in gradients if each is not None][:1]


class Updates:
    """Records whether optimizers have changed weights before the loop, in the running step, and in earlier ones."""

    def __init__(self, before: Callable[[Optimizer, object, object], None], stop: Callable[[], None]) -> None:
        """`before` gets each optimizer, and the arguments and keywords of its step. It calls `note`, or raises.

        `stop` raises if a peer was lost. It is called when a scaler has skipped the update.
        """
        self.begun = False
        """Whether an optimizer has begun to change weights in this step."""
        self.reached = False
        """Whether one has, or a scaler has skipped that: gradients that an aborted collective has spoilt are not finite."""
        self.ever = False
        """Whether one has in some complete step."""
        self.always = False
        """Whether one has in every complete step, and there was one."""
        self._outside = 0
        self._steps = 0
        self._unfinished = 0
        self._sees_ends = False  # torch reports the end of each update; a compiled one may hide it
        self._hooks = (
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(self._after),
        )
        self._stop = stop
        self._end_watch = scalers.watch_steps(self._after_scaler)

    def note_outside(self) -> bool:
        """Note an update before the step loop. Return True once, when the script turns out to have a loop of its own."""
        self._outside += 1
        return self._outside == _OUTSIDE

    def begin_step(self) -> None:
        """Note that a step begins."""
        self.begun = self.reached = False
        self._unfinished = 0

    def note(self) -> None:
        """Note that an optimizer begins to change weights."""
        self.begun = self.reached = True
        self._unfinished += 1

    def complete_step(self) -> None:
        """Note that the step is complete."""
        self.always = self.begun and (self.always or not self._steps)
        self.ever |= self.begun
        self._steps += 1

    def check(self, step: int) -> None:
        """Raise `InterruptedUpdateError` if an exception left an optimizer's step half-way, and the script caught it."""
        if self._sees_ends and self._unfinished > 0:
            raise InterruptedUpdateError(
                f"an exception left an optimizer's step in step {step}, and the script caught it: the weights are updated in part.\n"
                "Let exceptions of optimizer.step() end the script: its rank is then replaced, and the step is repeated."
            )

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._end_watch()

    def _after_scaler(self) -> None:
        self.reached = True
        if not self.begun:
            self._stop()

    def _after(self, *_: Any) -> None:
        self._unfinished -= 1
        self._sees_ends = True
