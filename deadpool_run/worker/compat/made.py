"""Notes of learning rate schedulers and scalers as they are made: torch has hooks for modules and optimizers only."""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

KINDS = (LRScheduler, GradScaler)
_MOST = 4096
_made: "deque[weakref.ref[Any]]" = deque(maxlen=_MOST)


def watch() -> None:
    """Note from now on what is made. The classes stay as they are then: Python cannot undo that."""
    for kind in KINDS:
        if "__new__" not in vars(kind):
            kind.__new__ = _noting(kind)  # type: ignore[method-assign]


def take_made() -> list[Any]:
    """Return the live objects that were made since the last call."""
    references = [_made.popleft() for _ in range(len(_made))]
    return [made for reference in references if (made := reference()) is not None]


def is_step_of_scheduler(function: Any) -> bool:
    """Return whether a function is the one that a scheduler puts in place of its optimizer's `step`."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code is not None and code.co_filename == lr_scheduler.__file__


def _noting(kind: type[Any]) -> Callable[..., Any]:
    def make(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        of_base: Any = super(kind, cls).__new__
        made = of_base(cls) if of_base is object.__new__ else of_base(cls, *args, **kwargs)
        _made.append(weakref.ref(made))
        return made

    return make
