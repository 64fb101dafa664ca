"""Persistent workers of data loaders.

A loader draws the seed of its workers from a generator when it makes them, and nothing when it uses them again. So whether it has
persistent workers is state of the rank: it decides what random numbers later steps get.
"""

import functools
from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.data import DataLoader

from deadpool_run.errors import RefusedError

_NOTED = "noted_by_deadpool_run"
_LATE = (
    "a step is repeated for which a DataLoader with persistent_workers had its workers, and that loader was made after the loop had "
    "begun: it does not exist here.\nMake it before job.steps()."
)


class _Loaders:
    """The loaders with persistent workers, in the order in which this run of the script has made them."""

    def __init__(self) -> None:
        self.by_number: WeakValueDictionary[int, DataLoader[Any]] = WeakValueDictionary()
        self._next = 0

    def note(self, loader: DataLoader[Any]) -> None:
        if loader.persistent_workers and loader.num_workers > 0:
            self.by_number[self._next] = loader
            self._next += 1

    def forget(self) -> None:
        self.by_number.clear()
        self._next = 0


_loaders = _Loaders()


def note_loaders() -> None:
    """Note the loaders that are made from now on. Every process of a rank makes the same ones, in the same order."""
    make = DataLoader.__init__
    if hasattr(make, _NOTED):
        return

    @functools.wraps(make)
    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _loaders.note(self)

    setattr(init, _NOTED, True)
    DataLoader.__init__ = init  # type: ignore[method-assign]


def forget_loaders() -> None:
    """Begin to count again: the script runs again in this process."""
    _loaders.forget()


def with_workers() -> dict[str, bool]:
    """Return for each loader with persistent workers, by its number, whether it has made them."""
    return {str(number): has_workers(loader) for number, loader in _loaders.by_number.items()}


def set_with_workers(made: Mapping[str, bool]) -> None:
    """Set what `with_workers` returned, here or in another process of the rank. Raises `RefusedError` for an unknown loader.

    Workers that should not exist are ended. Those that should exist are made when the loader is used.
    """
    for number, has in made.items():
        loader = _loaders.by_number.get(int(number))
        if loader is None:
            if has:
                raise RefusedError(_LATE)
        elif has and not has_workers(loader):
            loader._iterator = _MadeElsewhere()  # type: ignore[assignment]  # noqa: SLF001
        elif not has:
            dismiss_workers(loader)


class _MadeElsewhere:
    """Persistent workers that another process of the rank had made, until the loader is used here."""

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Make them, and take their seed from a generator that nothing else uses."""
        del first_iter
        generator, loader.generator = loader.generator, torch.Generator()
        try:
            loader._iterator = loader._get_iterator()  # noqa: SLF001
        finally:
            loader.generator = generator


def has_workers(loader: Any) -> bool:
    """Return whether a DataLoader has started persistent workers."""
    return getattr(loader, "_iterator", None) is not None


def dismiss_workers(loader: DataLoader[Any]) -> None:
    """End a DataLoader's persistent workers; torch has no public way."""
    loader._iterator = None  # noqa: SLF001


def items_yielded(iterator: Any) -> int | None:
    """Return how many batches the iterator of a loader has yielded; None for other iterators."""
    found: int | None = getattr(iterator, "_num_yielded", None)
    return found
