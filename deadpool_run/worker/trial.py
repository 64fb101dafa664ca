"""The trial: on every start, step 1 is run twice from the same state, and must come to the same weights both times.

A step that is interrupted by a loss is run again from its snapshot. What a script carries from step to step outside of its
protected objects (a batch fetched ahead, an iterator's place, a counter in a variable) is not put back, and would silently
make other weights. The trial finds that before anything was lost: the first run of step 1 is for practice, its state is put
back from the snapshot as after a loss, and the second run counts.
"""

from enum import Enum

import torch

TRIAL_STEP = 1
"""The second of the steps that a newcomer rehearses: what is made lazily is mostly made in the first."""
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

    def is_due(self, completed: int, total: int) -> bool:
        """Say whether the next step is to be run for practice first."""
        return self.stage is Trial.Stage.DUE and completed == TRIAL_STEP < total

    def observe(self, digests: dict[str, int]) -> None:
        """Note what the first run came to, by tensor."""
        self._observed = digests

    def verdict(self, digests: dict[str, int]) -> str:
        """Compare what the second run came to; return what is wrong, an empty string if nothing is."""
        self.stage, observed, self._observed = Trial.Stage.OVER, self._observed, {}
        names = dict.fromkeys([*observed, *digests])
        different = [name for name in names if observed.get(name) != digests.get(name)]
        if not different:
            return ""
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        return (
            f"step {TRIAL_STEP} was run twice from the same state and came to different results: "
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
