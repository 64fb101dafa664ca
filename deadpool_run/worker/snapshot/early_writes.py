"""Writes to parameters before a step's update, which torch may not count: whether the script does such."""

from collections.abc import Iterable

from torch import Tensor

from deadpool_run.worker.state.digest import sample


class EarlyWrites:
    """Compares samples of parameters and optimizer state at the end of a step and before the next update."""

    def __init__(self) -> None:
        self.found = False
        """Whether the script writes parameters before its updates, in ways that torch may not count."""
        self._seen: list[tuple[Tensor, int]] = []

    def look(self, tensors: Iterable[Tensor]) -> None:
        """Sample these tensors, for `check`."""
        self._seen = [(tensor, sample(tensor)) for tensor in tensors]

    def check(self) -> None:
        """Before the first update of a step, note whether any of them has changed since `look`."""
        seen, self._seen = self._seen, []
        self.found |= any(sample(tensor) != before for tensor, before in seen)
