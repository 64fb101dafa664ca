"""Data loaders, and torch's own data sets and samplers: what of them may change from step to step.

The script's own data sets are objects as others are. They may have no variable but the loader. Samplers and generators of a loader
are not looked for here: `Job.batches` draws an epoch's order again, and sets their states itself.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

DRAWN_AGAIN = frozenset({"generator"})
"""Attributes of samplers whose state is not kept here."""
_LOOKED_INTO = ("dataset", "collate_fn", "worker_init_fn")
_OF_TORCH = "torch.utils.data."


def is_data(value: Any) -> bool:
    """Return whether an object is a loader, or a data set or a sampler of torch's own classes."""
    is_of_torch = type(value).__module__.startswith(_OF_TORCH) and isinstance(value, Dataset | Sampler)
    return is_of_torch or isinstance(value, DataLoader)


def parts_of(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the data set and the functions from which a loader gets its batches, by attribute."""
    return ((name, vars(loader).get(name)) for name in _LOOKED_INTO)
