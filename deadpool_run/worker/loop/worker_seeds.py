"""Seeds of random numbers in a loader's workers, for each batch.

So a worker's draws (random augmentation) depend on the epoch and the batch only, not on the worker or on its earlier batches: a worker
that starts in the middle of an epoch draws the same. This holds for the global generators, and for those in attributes of the
dataset and of `collate_fn`.
"""

from collections.abc import Callable
from typing import Any

from torch.utils.data import get_worker_info

from deadpool_run.worker.state.generators import SearchResult, drawn_from, search, seed_each
from deadpool_run.worker.state.rng import seed_global
from deadpool_run.worker.verify.script_names import warn

_MOST_NAMES = 5

_present: "_Seeds | None" = None
"""The seeds of the batch that this worker process loads."""
_found: dict[str, SearchResult] = {}
"""The generators and numbers of the dataset and of `collate_fn`, searched again in batches whose count is a power of two."""
_count = 0
_warned: set[str] = set()


class SeededIndices:
    """Indices that, as a loader's worker unpickles them, seed the worker's generators."""

    def __init__(self, index: Any, of_epoch: bytes, number: int) -> None:
        self._parts = index, of_epoch, number

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Unpickle as the bare indices."""
        return _seed_worker, self._parts


class SeededCollate:
    """A loader's `collate_fn` whose own generators, too, are seeded for each batch in a worker."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Any) -> Any:
        """Collate the items of a batch."""
        if _present is None:
            return self._collate(items)
        _present.apply("collate_fn", self._collate)
        batch = self._collate(items)
        _present.check("collate_fn", self._collate)
        if (info := get_worker_info()) is not None:
            _present.check("dataset", info.dataset)
        return batch


class _Seeds:
    """The seeds of one batch."""

    def __init__(self, of_epoch: bytes, number: int) -> None:
        self._seed = of_epoch + number.to_bytes(8, "little")
        self._looks = _count & (_count - 1) == 0

    def apply(self, what: str, root: Any) -> None:
        """Seed the generators in an object, in the order in which they are found."""
        if self._looks:
            _found[what] = search(root)
        seed_each(_found[what].generators, self._seed + f"{what} ".encode())

    def check(self, what: str, root: Any) -> None:
        """Warn of generators and numbers that are not as before the batch was loaded."""
        if not self._looks or what in _warned:
            return
        before, now = _found[what], search(root)
        known = {id(each) for each in before.generators}
        if any(id(each) not in known for each in now.generators):
            _warned.add(what)
            warn(
                f"batches(): the {what} makes a generator of random numbers while a worker loads a batch, so that the worker draws "
                "other numbers after a repair.\nMake it in __init__, or derive the seed from the sample's index and the epoch."
            )
        elif changed := [name for name, value in now.numbers.items() if before.numbers.get(name, value) != value]:
            _warned.add(what)
            warn(
                f"batches(): the {what} changes {', '.join(changed[:_MOST_NAMES])} while a worker loads a batch. After a repair another "
                "worker starts with the value of set-up.\nIf batches depend on it, derive it from the sample's index and the epoch."
            )

    def drawn(self) -> bytes:
        """Return random bytes for the global generators."""
        return drawn_from(self._seed)


def _seed_worker(index: Any, of_epoch: bytes, number: int) -> Any:
    global _present, _count  # noqa: PLW0603 - of this process
    if (info := get_worker_info()) is not None:
        _count += 1
        _present = _Seeds(of_epoch, number)
        seed_global(_present.drawn())
        _present.apply("dataset", info.dataset)
    return index
