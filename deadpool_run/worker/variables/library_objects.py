"""Objects of libraries' classes that snapshots keep: those that are nothing but numbers, tensors, arrays, generators and references.

An average's counter, a meter, a schedule, an environment: the library counts in them, and the script's next step depends on it. An object that has
anything else as well, such as a file, a queue or a thread, is left alone, since its numbers may belong to that.
"""

import logging
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from deadpool_run.worker.codec import table_of
from deadpool_run.worker.state import generators
from deadpool_run.worker.variables.modules import LEAVES
from deadpool_run.worker.variables.values.kinds.library_values import is_immutable, is_kept
from deadpool_run.worker.variables.values.kinds.own_objects import is_plain
from deadpool_run.worker.variables.values.tensors import is_array_type, is_numeric_array, is_object_array
from deadpool_run.worker.variables.values.writer import SEQUENCES

_SEQUENCES = frozenset(SEQUENCES.values())
_DICTS = frozenset({dict, OrderedDict})
_MOST_PARTS = 256
_MOST_OBJECTS = 256
"""In one object. A tree of settings may have thousands, and each costs some time in each step."""
_REFERENCES = (
    ModuleType,
    type,
    FunctionType,
    BuiltinFunctionType,
    nn.Module,
    Optimizer,
    dist.ProcessGroup,
    DeviceMesh,
    Dataset,
    DataLoader,
    Sampler,
    weakref.ReferenceType,
)
"""Classes of objects that others refer to, and that do not advance from step to step, or are kept by themselves."""
_BESIDE = (logging.Logger, type(threading.Lock()), type(threading.RLock()))
"""Classes of what an object may have beside its values. In one of the standard library, the values may belong to them: a queue."""
_DEEPEST = 3


def has_only_values(value: Any, is_known: Callable[[object], bool]) -> bool:
    """Return whether an object, and those inside it, have only values and references. `is_known`: an object is kept by itself."""
    is_left_alone = isinstance(value, (*_REFERENCES, *_BESIDE))
    return is_plain(type(value)) and not is_left_alone and _Search(is_known).is_value(value)


class _Search:
    """A search through an object and those inside it: in attributes, in lists, tuples and dicts there, and in their dicts."""

    def __init__(self, is_known: Callable[[object], bool]) -> None:
        self._is_known = is_known
        self._seen: set[int] = set()

    def is_value(self, value: Any, depth: int = 0, *, objects: bool = True) -> bool:
        """Return whether all of it is values and references. Without `objects`, objects of libraries count as neither."""
        kind = type(value)
        if kind in LEAVES or kind is Tensor or is_immutable(value) or is_kept(value) or self._is_known(value):
            return True
        if is_numeric_array(value) or is_array_type(value) or generators.kind_of(value) != "":
            return True
        if kind in _SEQUENCES or kind in _DICTS:
            return self._is_container_of_values(kind, value, depth, objects=objects)
        if kind is MethodType:
            return self.is_value(value.__self__, depth, objects=objects)
        if isinstance(value, _REFERENCES) or (objects and self._is_object_of_values(kind, value)):
            return True
        return self._is_table_of_values(kind, value, depth)

    def _is_table_of_values(self, kind: type, value: Any, depth: int) -> bool:
        """Return whether a value of a library's own class of containers, or an array of objects, has only values: settings, say.

        Runs no code of the class.
        """
        base: Any = next((each for each in (dict, list, tuple) if issubclass(kind, each)), None)
        is_array = is_object_array(value)
        if (
            not (base or is_array)
            or depth == _DEEPEST
            or (value.size if is_array else base.__len__(value)) > _MOST_PARTS
        ):
            return False
        items = value.flat if is_array else base.__iter__(value)
        inside = [*dict.keys(value), *dict.values(value)] if base is dict else list(items)
        return all(self.is_value(each, depth + 1, objects=False) for each in (*inside, *table_of(value).values()))

    def _is_object_of_values(self, kind: type, value: Any) -> bool:
        if isinstance(value, _BESIDE) or id(value) in self._seen:
            return True
        self._seen.add(id(value))
        if not is_plain(kind) or len(self._seen) > _MOST_OBJECTS:
            return False
        is_standard = kind.__module__.partition(".")[0] in sys.stdlib_module_names
        return all(self.is_value(each, objects=not is_standard) for each in vars(value).values())

    def _is_container_of_values(self, kind: type, value: Any, depth: int, *, objects: bool) -> bool:
        """Objects are looked for in a dict with names as keys, and directly in a list or a tuple (`Scopes`)."""
        if depth == _DEEPEST or len(value) > _MOST_PARTS:
            return False
        if kind in _SEQUENCES:
            objects = objects and kind in (list, tuple)
            return all(self.is_value(each, depth + 1, objects=objects and not _is_container(each)) for each in value)
        objects = objects and all(type(key) is str for key in value)
        return all(self.is_value(each, depth + 1, objects=False) for each in value) and all(
            self.is_value(each, depth + 1, objects=objects) for each in value.values()
        )


def _is_container(value: Any) -> bool:
    return type(value) in _SEQUENCES or type(value) in _DICTS
