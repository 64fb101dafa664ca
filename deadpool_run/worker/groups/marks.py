"""Marks: what each step computed first, so that a step that is run again after a loss is known to compute the same.

The mark of a step is a digest of what this rank puts into the step's first reduction of data: mostly gradients, which
depend on the batch, the weights and all that was drawn. It is also on the status page, for whoever takes the rank over.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from deadpool_run.vault.status_page import RankEntry
from deadpool_run.worker.state.digest import sample

DIFFERENT = (
    "a step that was run again after a loss computes something else than before: this rank's part of its first {what} "
    "differs.\n"
    "The script carries something from one step to the next that no snapshot holds, such as the place of an iterator, a "
    "batch fetched ahead, or a value in a variable: take batches from job.batches(loader), derive them from step.index, or "
    "job.protect() an object that has the state. If the computation itself is not reproducible, call "
    "torch.use_deterministic_algorithms(True)."
)
_LEAST = 16
"""Elements: smaller tensors are losses, norms, and flags that may depend on the clock."""
_KEPT = 64
"""Steps of which the marks are kept."""


class Marks:
    """The marks of one rank's steps. Collectives mark from any thread; a step has one mark."""

    def __init__(self, rank_entry: RankEntry | None) -> None:
        self.open = False
        """Whether the step that runs has none yet."""
        self._rank_entry = rank_entry
        self._step = -1
        self._seen: OrderedDict[int, int] = OrderedDict()

    def begin_step(self, step: int, *, marking: bool) -> None:
        """Note that a step begins; with `marking`, one that is to be marked."""
        self._step, self.open = step, marking

    def inherit(self, rank_entry: RankEntry) -> None:
        """Take over the rank's rank entry, with the mark that its last owner left."""
        self._rank_entry = rank_entry
        if rank_entry.marked_step:
            self._seen[rank_entry.marked_step - 1] = rank_entry.mark

    def put(self, tensors: Sequence[Tensor]) -> bool:
        """Mark the step by what it sends; False if the same step was marked otherwise before.

        Control-sized tensors, and those of a device that would have to be waited for, mark nothing.
        """
        if any(tensor.is_cuda for tensor in tensors):
            self.open = False
            return True
        data = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel() >= _LEAST]
        if not data:
            return True
        self.open = False
        mark = sample(data[0])
        before = self._seen.get(self._step)
        if before is not None:
            return before == mark
        self._seen[self._step] = mark
        if len(self._seen) > _KEPT:
            self._seen.popitem(last=False)
        if self._rank_entry is not None:
            self._rank_entry.mark, self._rank_entry.marked_step = mark, self._step + 1
        return True
