"""The trial: after each start, one step is run twice from the same state, and must give the same weights both times.

A step that a loss interrupts is repeated from its snapshot. State that a script carries from step to step outside of its
protected objects (a prefetched batch, an iterator's position, a counter in a variable) is not restored, and would
silently change the weights. The trial finds that before anything is lost: the first run of the step is a rehearsal, its
state is restored from the snapshot as after a loss, and the second run counts.

The trial is step 1, the second of those that a replacement rehearses: lazy objects are mostly created in step 0. A DDP
with a static graph decides its buckets later, and then reduces in another order: there it is the first step after that.
"""

from enum import Enum

import torch

_FIRST = 1
_SHOWN = 3


class Trial:
    """The stage of the trial, and the digests of its first run."""

    class Stage(Enum):
        """Of the trial."""

        DUE = "due"
        RUNNING = "running"
        RAN = "ran"
        OVER = "over"

    def __init__(self, *, wanted: bool) -> None:
        self.stage = Trial.Stage.DUE if wanted else Trial.Stage.OVER
        self._observed: dict[str, int] = {}

    @property
    def running(self) -> bool:
        """Whether the running step is the trial's first run."""
        return self.stage is Trial.Stage.RUNNING

    def may_begin(self, completed: int, total: int) -> bool:
        """Return whether the next step may be the trial."""
        return self.stage is Trial.Stage.DUE and _FIRST <= completed < total

    def observe(self, digests: dict[str, int]) -> None:
        """Keep the digests of the first run, by tensor."""
        self._observed = digests

    def end(self) -> None:
        """End the first run; nothing is compared if it was interrupted."""
        self.stage = Trial.Stage.RAN if self._observed else Trial.Stage.OVER

    def verdict(self, step: int, digests: dict[str, int]) -> str:
        """Compare the digests of the second run; return an error message, empty if they are equal."""
        self.stage, observed, self._observed = Trial.Stage.OVER, self._observed, {}
        names = dict.fromkeys([*observed, *digests])
        different = [name for name in names if observed.get(name) != digests.get(name)]
        if not different:
            return ""
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        return (
            f"step {step} was run twice from the same state and gave different results: "
            f"{', '.join(different[:_SHOWN])}{more} of {len(names)} differ. After a loss the interrupted step is "
            "run again, and would change the weights.\n"
            "Either the script carries state from one step to the next that no snapshot holds, such as a prefetched batch, the "
            "position of an iterator, a counter or an average in a variable: take batches from job.batches(loader), derive "
            "them from step.index, or job.protect() an object that has the state. "
            "Or it skips work while job.rehearsing is true: skip only output. "
            f"Or the computation is not reproducible{_determinism()}. deadpool_run.init(verify=False) turns this check off."
        )


def _determinism() -> str:
    if torch.are_deterministic_algorithms_enabled():
        return ""
    return ": call torch.use_deterministic_algorithms(True)"
