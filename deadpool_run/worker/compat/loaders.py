"""Persistent workers of data loaders.

A loader draws the seed of its workers from a generator when it makes them, and nothing when it uses them again. So whether it has
persistent workers is state of the rank: it decides what random numbers later steps get.
"""

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.utils.data import DataLoader

from deadpool_run.errors import RefusedError

_LATE = (
    "a DataLoader with persistent_workers was made after the loop had begun, and has workers. This process has no such loader.\n"
    "Make it before job.steps()."
)


class _Loaders:
    """The loaders that this run of the script has made, by their numbers."""

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


def note_loaders() -> None:
    """Note the loaders that are made from now on. Every process of a rank makes the same ones, in the same order.

    In `__new__`, because torchdata's `StatefulDataLoader` does not call the `__init__` of its base class.
    """
    if "__new__" in vars(DataLoader):
        return

    def new(kind: type[DataLoader[Any]], *_args: object, **_options: object) -> DataLoader[Any]:
        loader = object.__new__(kind)
        _loaders.note(loader)
        return loader

    DataLoader.__new__ = new  # type: ignore[assignment]


def forget_loaders() -> None:
    """Begin to count again: the script runs again in this process."""
    _loaders.forget()


def with_workers() -> dict[str, bool]:
    """Return for each loader with persistent workers, by its number, whether it has made them."""
    found = _loaders.by_number.items()
    return {str(number): has_workers(loader) for number, loader in found if _are_persistent(loader)}


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


def _are_persistent(loader: Any) -> bool:
    return bool(getattr(loader, "persistent_workers", False)) and getattr(loader, "num_workers", 0) > 0


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
