"""The trial: on every start, a step is run twice from the same state, and must come to the same weights both times.

A step that is interrupted by a loss is run again from its snapshot. What a script carries from step to step outside of its
protected objects (a batch fetched ahead, an iterator's place, a counter in a variable) is not put back, and would silently
make other weights. The trial finds that before anything was lost: the first run of the step is for practice, its state is put
back from the snapshot as after a loss, and the second run counts.

It is step 1, the second of those that a replacement rehearses: what is made lazily is mostly made in step 0. A DDP with a static
graph decides its buckets later, and reduces in another order from then on: there it is the first step after that.
"""

from enum import Enum

import torch

_FIRST = 1
_SHOWN = 3


class Trial:
    """Where the trial is, and what its first run came to."""

    class Stage(Enum):
        """What comes next."""

        DUE = "due"
        RUNNING = "running"
        RAN = "ran"
        OVER = "over"

    def __init__(self, *, wanted: bool) -> None:
        self.stage = Trial.Stage.DUE if wanted else Trial.Stage.OVER
        self._observed: dict[str, int] = {}

    @property
    def running(self) -> bool:
        """Whether the step that runs is for practice."""
        return self.stage is Trial.Stage.RUNNING

    def may_begin(self, completed: int, total: int) -> bool:
        """Say whether the next step may be run for practice first."""
        return self.stage is Trial.Stage.DUE and _FIRST <= completed < total

    def observe(self, digests: dict[str, int]) -> None:
        """Note what the first run came to, by tensor."""
        self._observed = digests

    def end(self) -> None:
        """Note that the first run is over; nothing is compared if it was cut."""
        self.stage = Trial.Stage.RAN if self._observed else Trial.Stage.OVER

    def verdict(self, step: int, digests: dict[str, int]) -> str:
        """Compare what the second run of a step came to; return what is wrong, an empty string if nothing is."""
        self.stage, observed, self._observed = Trial.Stage.OVER, self._observed, {}
        names = dict.fromkeys([*observed, *digests])
        different = [name for name in names if observed.get(name) != digests.get(name)]
        if not different:
            return ""
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        return (
            f"step {step} was run twice from the same state and came to different results: "
            f"{', '.join(different[:_SHOWN])}{more} of {len(names)} differ. After a loss the interrupted step is "
            "run again, and would change the weights.\n"
            "Either the script carries something from one step to the next that no snapshot holds, such as a batch fetched "
            "ahead, the place of an iterator, a counter or an average in a variable: take batches from "
            "job.batches(loader), derive them from step.index, or job.protect() an object that has the state. "
            "Or it leaves out work while job.rehearsing is true: leave out only output. "
            f"Or the computation is not reproducible{_determinism()}. deadpool_run.init(verify=False) turns this check off."
        )


def _determinism() -> str:
    if torch.are_deterministic_algorithms_enabled():
        return ""
    return ": call torch.use_deterministic_algorithms(True)"
