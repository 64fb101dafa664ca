"""Data loaders, and torch's own data sets and samplers: what of them may change from step to step.

The script's own data sets and samplers are objects as others are. They may have no variable but the loader.
"""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, Sampler

_LOOKED_INTO = ("dataset", "batch_sampler", "sampler", "collate_fn", "worker_init_fn")
_OF_TORCH = "torch.utils.data."


def is_data(value: Any) -> bool:
    """Return whether an object is a loader, or a data set or a sampler of torch's own classes."""
    is_of_torch = type(value).__module__.startswith(_OF_TORCH) and isinstance(value, Dataset | Sampler)
    return is_of_torch or isinstance(value, DataLoader)


def parts_of(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the objects and functions from which a loader gets its batches, by attribute."""
    return ((name, vars(loader).get(name)) for name in _LOOKED_INTO)


def generator_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Return the loader's generator by attribute; nothing if it has none."""
    return {} if loader.generator is None else {"generator": loader.generator}
