"""Persistent workers of data loaders.

A loader draws the seed of its workers from a generator when it makes them, and nothing when it uses them again: their generators go
on from where the last epoch left them. So the seed and the number of epochs since are state of the rank, and workers are seeded
again at each epoch but the first. What they draw then depends on these two numbers, also in a step that is repeated and in a replacement.
"""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.data import DataLoader, IterDataPipe
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from deadpool_run.errors import RefusedError

_LATE = (
    "a DataLoader with persistent_workers was made after the loop had begun, and has workers. This process has no such loader.\n"
    "Make it before job.steps()."
)

Workers = list[int]
"""Persistent workers, in snapshots: their seed, and the number of epochs that they have begun; 0 for a loader that counts by itself."""
SeedEpoch = Callable[[int, int], None]
"""Seeds a worker, in its process, for an epoch: with the loader's seed and the epoch's number, which begins at 1."""


class _Loaders:
    """The loaders that this run of the script has made, by their numbers."""

    seed_epoch: SeedEpoch

    def __init__(self) -> None:
        self.by_number: WeakValueDictionary[int, DataLoader[Any]] = WeakValueDictionary()
        self._next = 0

    def note(self, loader: DataLoader[Any]) -> None:
        self.by_number[self._next] = loader
        self._next += 1

    def forget(self) -> None:
        self.by_number.clear()
        self._next = 0


_loaders = _Loaders()


def note_loaders(seed_epoch: SeedEpoch) -> None:
    """Note the loaders that are made from now on. Every process of a rank makes the same ones, in the same order.

    In `__new__`, because torchdata's `StatefulDataLoader` does not call the `__init__` of its base class. `seed_epoch` is called
    in persistent workers before each epoch but their first.
    """
    if "__new__" in vars(DataLoader):
        return

    def new(kind: type[DataLoader[Any]], *_args: object, **_options: object) -> DataLoader[Any]:
        loader = object.__new__(kind)
        _loaders.note(loader)
        return loader

    DataLoader.__new__ = new  # type: ignore[assignment]
    _loaders.seed_epoch = seed_epoch
    _number_epochs()


def _number_epochs() -> None:
    make, reset = _BaseDataLoaderIter.__init__, _BaseDataLoaderIter._reset  # noqa: SLF001

    def make_again(self: _BaseDataLoaderIter, loader: DataLoader[Any]) -> None:
        make(self, loader)
        made = getattr(loader, "_iterator", None)
        if type(made) is _MadeElsewhere:
            self._base_seed = made.seed

    def reset_numbered(self: Any, loader: DataLoader[Any], first_iter: bool = False) -> None:
        reset(self, loader, first_iter)
        counts = isinstance(self, _MultiProcessingDataLoaderIter) and not isinstance(loader.dataset, IterDataPipe)
        if counts and _are_persistent(loader):
            before = loader._iterator if first_iter else self._shared_seed  # noqa: SLF001
            epoch = before.epoch + 1 if isinstance(before, _MadeElsewhere | _EpochSeed) else 1
            self._shared_seed = _EpochSeed(self._base_seed, epoch)  # sent to the workers, if it is not their first

    _BaseDataLoaderIter.__init__ = make_again  # type: ignore[method-assign]
    _BaseDataLoaderIter._reset = reset_numbered  # type: ignore[method-assign]  # noqa: SLF001


def forget_loaders() -> None:
    """Begin to count again: the script runs again in this process."""
    _loaders.forget()


def all_workers() -> dict[str, Workers | None]:
    """Return the persistent workers of each loader that may have some, by its number."""
    return {str(number): workers_of(each) for number, each in _loaders.by_number.items() if _are_persistent(each)}


def set_all_workers(made: Mapping[str, Workers | None]) -> None:
    """Set what `all_workers` returned, here or in another process of the rank. Raises `RefusedError` for an unknown loader."""
    for number, workers in made.items():
        loader = _loaders.by_number.get(int(number))
        if loader is not None:
            set_workers(loader, workers)
        elif workers is not None:
            raise RefusedError(_LATE)


def workers_of(loader: Any) -> Workers | None:
    """Return the persistent workers of a loader; None if there are none."""
    iterator: Any = loader._iterator if _are_persistent(loader) else None  # noqa: SLF001
    if iterator is None:
        return None
    if type(iterator) is _MadeElsewhere:
        return [iterator.seed, iterator.epoch]
    counted = iterator._shared_seed  # noqa: SLF001
    return [iterator._base_seed, counted.epoch if type(counted) is _EpochSeed else 0]  # noqa: SLF001


def set_workers(loader: Any, workers: Workers | None) -> None:
    """Set what `workers_of` returned, here or in another process of the rank.

    Workers that should not exist are ended. Those that should exist are made when the loader is used.
    """
    now = workers_of(loader)
    if workers is None:
        if now is not None:
            dismiss_workers(loader)
    elif now is None or now[0] != workers[0] or not has_workers(loader):
        loader._iterator = _MadeElsewhere(*workers)  # noqa: SLF001
    elif workers[1]:
        loader._iterator._shared_seed.epoch = workers[1]  # noqa: SLF001


class _EpochSeed:
    """The seed of an epoch in a message to a worker, which is seeded as it unpickles this."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._seed, self.epoch = seed, epoch

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Unpickle as None."""
        return _loaders.seed_epoch, (self._seed, self.epoch)


class _SeededStart:
    """A loader's `worker_init_fn` in workers that begin with a later epoch than the first."""

    def __init__(self, begin: Callable[[int], object] | None, seed_epoch: SeedEpoch, seed: int, epoch: int) -> None:
        self._begin, self._seed_epoch, self._numbers = begin, seed_epoch, (seed, epoch)

    def __call__(self, worker: int) -> None:
        if self._begin is not None:
            self._begin(worker)
        self._seed_epoch(*self._numbers)


class _MadeElsewhere:
    """Persistent workers that another process of the rank had made, until the loader is used here."""

    def __init__(self, seed: int, epoch: int) -> None:
        self.seed, self.epoch = seed, epoch

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Make them, and draw nothing from the loader's generator."""
        del first_iter
        generator, begin = loader.generator, loader.worker_init_fn
        loader.generator = torch.Generator()
        if self.epoch:
            loader.worker_init_fn = _SeededStart(begin, _loaders.seed_epoch, self.seed, self.epoch + 1)
        try:
            loader._iterator = loader._get_iterator()  # noqa: SLF001
        finally:
            loader.generator, loader.worker_init_fn = generator, begin


def _are_persistent(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers > 0


def has_workers(loader: Any) -> bool:
    """Return whether a DataLoader has started persistent workers in this process."""
    return type(getattr(loader, "_iterator", None)) not in (type(None), _MadeElsewhere)


def dismiss_workers(loader: DataLoader[Any]) -> None:
    """End a DataLoader's persistent workers; torch has no public way."""
    loader._iterator = None  # noqa: SLF001


def items_yielded(iterator: Any) -> int | None:
    """Return how many batches the iterator of a loader has yielded; None for other iterators."""
    found: int | None = getattr(iterator, "_num_yielded", None)
    return found
