"""A job's step loop for code that has a loop of its own and asks for one step at a time.

`Job.steps` is a generator with a block in its body; a framework calls back instead. A `StepDriver` holds the generator and
begins and ends the blocks. What the block swallows, an optimizer that is guarded swallows here: the rest of the framework's
step then runs on, with weights as they were, and everything that it counted is put back when the next step is asked for.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from deadpool_run.errors import StepAborted
from deadpool_run.worker.job import Job, Step


class StepDriver:
    """The steps of a job, one call each."""

    def __init__(self, job: Job, total: int) -> None:
        self.job = job
        self._steps = job.steps(total)
        self._step: Step | None = None

    def next(self) -> int | None:
        """End the step that runs, and begin the next: return its index, or None behind the last.

        A lost peer is handled here. Then every protected object is that of the step whose index is returned, which need
        not be the one behind the last.
        """
        self.close()
        self._step = next(self._steps, None)
        if self._step is None:
            return None
        self._step.__enter__()
        return self._step.index

    def close(self) -> None:
        """End the step that runs, if one does."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    @property
    def for_practice(self) -> bool:
        """Whether what the running step comes to is not to be shown or kept: it is a rehearsal, or will be repeated."""
        return self.job.rehearsing or self.job.interrupted


def guard(optimizer: Optimizer) -> None:
    """Have the optimizer's `step()` return without effect where it would raise `StepAborted`. Once an optimizer.

    A closure is called first, so that a peer that is lost in its forward or backward is noticed before weights change.
    LBFGS calls its closure many times, and is left to: there weights are put back from the last snapshot.
    """
    step: Any = optimizer.step
    if getattr(step, "guarded_by_deadpool", False):
        return

    @functools.wraps(step)
    def guarded(closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        result = None
        if closure is not None and not isinstance(optimizer, LBFGS):
            with torch.enable_grad():
                result = closure()
            closure = _Returns(result)
        try:
            return step(*((closure, *args) if closure or args else ()), **kwargs)
        except StepAborted:
            return result

    guarded.guarded_by_deadpool = True  # type: ignore[attr-defined]
    optimizer.step = guarded  # type: ignore[method-assign]


class _Returns:
    """A closure that has been called: gives what it returned."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def __call__(self) -> Any:
        return self._result
