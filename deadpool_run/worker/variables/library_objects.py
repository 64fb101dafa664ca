"""Objects of libraries' classes that snapshots keep: those that are nothing but numbers, tensors and references.

An average's counter, a meter, a schedule: the library counts in them, and the script's next step depends on it. An object that has
anything else as well, such as a file, a queue or a thread, is left alone, since its numbers may belong to that.
"""

import os
from abc import ABCMeta
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from deadpool_run.worker.variables.modules import LEAVES
from deadpool_run.worker.variables.values.library_values import is_immutable
from deadpool_run.worker.variables.values.writer import SEQUENCES

_SEQUENCES = frozenset(SEQUENCES.values())
_DICTS = frozenset({dict, OrderedDict})
_MOST_PARTS = 256
_REFERENCES = (
    ModuleType,
    type,
    FunctionType,
    BuiltinFunctionType,
    nn.Module,
    Optimizer,
    dist.ProcessGroup,
    DeviceMesh,
)
"""Classes of objects that others refer to, and that do not advance from step to step, or are kept by themselves."""
_DEEPEST = 3
_ENVIRONMENT = type(os.environ)
"""The launcher itself writes there."""
_NEW: Any = object.__new__
_REDUCE: Any = object.__reduce_ex__
_OURS = __name__.partition(".")[0]


class _Plain:
    """A class without a part written in C."""


def is_flat(value: Any, is_known: Callable[[object], bool]) -> bool:
    """Return whether all attributes of an object are values or references. `is_known`: an object is kept by itself."""
    return _is_plain(type(value)) and all(_is_value(each, is_known) for each in vars(value).values())


def _is_plain(kind: type) -> bool:
    """Return whether all state of a class's objects is in attributes: no class that it derives from is written in C, or has slots."""
    return (
        type(kind) in (type, ABCMeta)
        and kind.__basicsize__ == _Plain.__basicsize__
        and kind.__new__ is _NEW
        and kind.__reduce_ex__ is _REDUCE
        and not kind.__module__.startswith(_OURS)
        and kind is not _ENVIRONMENT
    )


def _is_value(value: Any, is_known: Callable[[object], bool], depth: int = 0) -> bool:
    kind = type(value)
    if kind in LEAVES or kind is Tensor or is_immutable(value) or is_known(value) or isinstance(value, _REFERENCES):
        return True
    parts = value if kind in _SEQUENCES else (*value.keys(), *value.values()) if kind in _DICTS else None
    if parts is None or depth == _DEEPEST or len(parts) > _MOST_PARTS:
        return False
    return all(_is_value(each, is_known, depth + 1) for each in parts)
