"""A job's steps for a framework with its own loop, which asks for one step at a time.

`Job.steps` is a generator whose body has a `with` block; a framework uses callbacks instead. A `StepDriver` holds the
generator, and enters and exits the blocks. Each integration extends it with its framework's loop. A guarded optimizer swallows
`StepAborted`, as the block would. The rest of the framework's step then runs with unchanged weights, and its counters are
restored with the next step.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from deadpool_run.errors import StepAborted
from deadpool_run.worker.job import Job, Step


class StepDriver:
    """The steps of a job, one call each, for the trainer of a framework."""

    def __init__(self, trainer: Any, job: Job) -> None:
        self.job = job
        self._trainer = trainer
        self._steps: Iterator[Step] | None = None  # None until the framework's loop begins
        self._step: Step | None = None
        self._index: int | None = None  # of the step that runs or will start next

    def next(self) -> int | None:
        """End the running step, and begin the next: return its index, or None after the last.

        After a loss, the repair happens here: every protected object has the state of the returned step, which may be an
        earlier one.
        """
        assert self._steps is not None
        if self._step is not None:
            self._step.__exit__(None, None, None)
        self._step = next(self._steps, None)
        self._index = None
        if self._step is not None:
            self._step.__enter__()
            self._index = self._step.index
        return self._index

    @property
    def is_discarded(self) -> bool:
        """Whether the running step is a rehearsal or will be repeated, so that its results are discarded."""
        return self._steps is not None and (self.job.rehearsing or self.job.interrupted)


def guard(optimizer: Optimizer) -> None:
    """Make the optimizer's `step()` return without effect where it would raise `StepAborted`. Idempotent.

    A closure is called first: the loss of a peer in its forward or backward is then known before weights change. LBFGS calls
    its closure many times; there, weights are restored from the last snapshot.
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
            args = (lambda: result, *args)
        elif closure is not None or args:
            args = (closure, *args)
        try:
            return step(*args, **kwargs)
        except StepAborted:
            return result

    guarded.guarded_by_deadpool = True  # type: ignore[attr-defined]
    optimizer.step = guarded  # type: ignore[method-assign]
