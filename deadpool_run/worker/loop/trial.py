"""The trial: after each start, one step is run twice from the same state, and must give the same weights both times.

A step that a loss interrupts is repeated from its snapshot. State that a script carries from step to step outside of its
protected objects (a prefetched batch, an iterator's position, a counter in a variable) is not restored, and would
silently change the weights. The trial finds that before anything is lost: the first run of the step is a rehearsal, its
state is restored from the snapshot as after a loss, and the second run counts.

The trial is step 1, the second of those that a replacement rehearses: lazy objects are mostly created in step 0. A DDP
with a static graph decides its buckets later, and then reduces in another order: there it is the first step after that.
"""

import torch

_FIRST = 1
_SHOWN = 3


class Trial:
    """Whether the trial is due or running, and the digests of its first run."""

    def __init__(self, *, wanted: bool) -> None:
        self._is_due = wanted
        self.running = False
        """Whether the running step is the trial's first run."""
        self.observed: dict[str, int] = {}
        """The digests of the first run, by tensor; empty if there is nothing to compare: no trial, or an interrupted one."""

    def may_begin(self, completed: int, total: int) -> bool:
        """Return whether the next step may be the trial."""
        return self._is_due and _FIRST <= completed < total

    def begin(self) -> None:
        """Begin the first run."""
        self._is_due, self.running = False, True

    def verdict(self, step: int, digests: dict[str, int]) -> str:
        """Compare the digests of the second run; return an error message, empty if they are equal."""
        observed, self.observed = self.observed, {}
        names = dict.fromkeys([*observed, *digests])
        different = [name for name in names if observed.get(name) != digests.get(name)]
        if not different:
            return ""
        remedy = ": call torch.use_deterministic_algorithms(True)"
        if torch.are_deterministic_algorithms_enabled():
            remedy = ""
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        return (
            f"step {step} was run twice from the same state and gave different results: "
            f"{', '.join(different[:_SHOWN])}{more} of {len(names)} differ. After a loss the interrupted step is "
            "run again, and would change the weights.\n"
            "Either the script carries state from one step to the next that no snapshot holds, such as a prefetched batch, the "
            "position of an iterator, a counter or an average in a variable: take batches from job.batches(loader), derive "
            "them from step.index, or job.protect() an object that has the state. "
            "Or it skips work while job.rehearsing is true: skip only output. "
            f"Or the computation is not reproducible{remedy}. deadpool_run.init(verify=False) turns this check off."
        )
