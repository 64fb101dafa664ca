"""Digests of steps, called marks: they show whether a step that is repeated after a loss computes the same as before.

The mark is a digest of this rank's input to the step's first reduction of data: mostly gradients, which depend on the batch,
the weights and all random draws. It is also on the status page, for a replacement of the rank.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor

from deadpool_run.vault.status_page import RankEntry
from deadpool_run.worker.state.digest import sample

DIFFERENT = (
    "a step that was repeated after a loss computed a different result: this rank's input to its first {what} differs.\n"
    "The script carries state from one step to the next that no snapshot holds, such as the position of an iterator, a "
    "prefetched batch, or an attribute of a module: take batches from job.batches(loader), derive them from step.index, or "
    "job.protect() an object that has the state. If the computation itself is not reproducible, call "
    "torch.use_deterministic_algorithms(True)."
)
_LEAST = 16
"""Elements. Smaller tensors are losses, norms, and flags that may depend on the clock."""
_KEPT = 64
"""The marks of this many steps are kept."""


class Marks:
    """The marks of one rank's steps, one per step; set from any thread."""

    def __init__(self, rank_entry: RankEntry) -> None:
        self.open = False
        """Whether the running step has no mark yet."""
        self._rank_entry = rank_entry
        self._step = -1
        self._seen: OrderedDict[int, int] = OrderedDict()

    def begin_step(self, step: int, *, marking: bool) -> None:
        """Begin a step; `marking`: it needs a mark."""
        self._step, self.open = step, marking

    def inherit(self, rank_entry: RankEntry) -> None:
        """Use this rank entry, and the mark that the rank's last owner left in it."""
        self._rank_entry = rank_entry
        if rank_entry.marked_step:
            self._seen[rank_entry.marked_step - 1] = rank_entry.mark

    def put(self, tensors: Sequence[Tensor]) -> bool:
        """Mark the step by its input; False if the same step had a different mark before.

        Small tensors give no mark, nor do CUDA tensors, which would need a synchronization.
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
        self._rank_entry.mark, self._rank_entry.marked_step = mark, self._step + 1
        return True
