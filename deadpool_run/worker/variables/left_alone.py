"""Objects that snapshots leave alone: whether another process of the rank has one that is further on.

A progress bar, a writer of logs, a container of a library: most are of no concern to the weights, so their use is not refused. After
a restore the user learns which of them do not have the state of the lost rank.
"""

import hashlib
import sys
from types import ModuleType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from deadpool_run.worker.codec import table_of
from deadpool_run.worker.variables.values.functions import CODE

_MOST_PARTS = 256
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_CONTAINERS: tuple[Any, ...] = (list, dict, set)
_OTHER = (*CODE, ModuleType, nn.Module, Optimizer)
_WELL_KNOWN = frozenset({*sys.stdlib_module_names, "torch", "numpy", __name__.partition(".")[0]})
"""Packages whose objects are looked after elsewhere, or refused when a step depends on them: iterators, loaders, queues."""


def digest_of(value: Any) -> str:
    """Return a digest of the numbers and strings directly in an object, and of the sizes of its containers; empty for code and models."""
    kind = type(value)  # a proxy would run code if asked for more
    if issubclass(kind, _OTHER) or kind.__module__.partition(".")[0] in _WELL_KNOWN:
        return ""
    found = {name: _shape(each) for name, each in list(table_of(value).items())[:_MOST_PARTS]}
    if issubclass(kind, dict):
        found |= {f"[{key!r}]": _shape(each) for key, each in list(dict.items(value))[:_MOST_PARTS] if type(key) is str}
    found["len"] = _shape(value)
    return hashlib.blake2b(repr(sorted(found.items())).encode(errors="replace"), digest_size=8).hexdigest()


def _shape(value: Any) -> Any:
    """Return a number or a string itself, the size of a container, and None for anything else."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    container = next((each for each in _CONTAINERS if issubclass(kind, each)), None)
    return None if container is None else container.__len__(value)
