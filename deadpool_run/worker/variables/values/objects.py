"""The objects that every process of a rank has when the loop begins, by name, and what is raised for values that are not kept."""

import weakref
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from operator import itemgetter
from types import FunctionType, MethodType
from typing import Any

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler

from deadpool_run.worker.variables.values.tensors import is_data
from deadpool_run.worker.variables.values.views import Memory, covers, has_whole_memory, memory_of, start_of

_MOST_TRIED = 8
"""Tensors before a view in memory of which one may have all of its bytes."""
OF_LOADERS = (Dataset, DataLoader, Sampler)
USED: tuple[Any, ...] = (
    *(FunctionType, MethodType, partial, type),
    *(nn.Module, Optimizer, ProcessGroup, DeviceMesh),
    *OF_LOADERS,
)
"""Classes of objects on which results depend. Others, such as a progress bar, are a replacement's own."""


class OpaqueError(Exception):
    """A value that cannot be kept: a file, an iterator, a model."""


class UnkeptDataError(OpaqueError):
    """Data that is not kept. The message has the reason, such as its size."""


class MadeLaterError(OpaqueError):
    """A container has an object of `USED` that was made after the loop began, and that cannot be kept."""


class Objects:
    """The objects that every process of a rank has when the loop begins, by name. Its tensors can be freed."""

    def __init__(self, *, weakly: bool = False) -> None:
        """With `weakly`, all objects can be freed. Those whose class does not allow it are left out."""
        self._weakly = weakly
        self._names: dict[int, str] = {}
        self._objects: dict[str, Any] = {}  # keeps other objects alive, so that identities are not used again
        self._memory: defaultdict[Memory, list[tuple[int, str]]] = defaultdict(list)
        """Where those with their own content begin, and their names, in this order."""
        self._whole: dict[Memory, str] = {}
        """The names of those that have all of their memory."""
        self._meshes: dict[DeviceMesh, str] = {}

    def add(self, name: str, obj: Any, *, weakly: bool = False) -> None:
        """Note an object under a new name."""
        may_go = self._weakly or weakly or is_data(obj)
        with suppress(TypeError):  # its class allows no weak references
            self._objects[name] = weakref.ref(obj) if may_go else obj
            self._names[id(obj)] = name

    def add_mesh(self, name: str, mesh: DeviceMesh) -> None:
        """Note a device mesh under a new name, unless an equal one has a name: torch's caches exchange equal ones."""
        if mesh not in self._meshes:
            self._meshes[mesh] = name
            self.add(name, mesh)

    def name_of_mesh(self, mesh: DeviceMesh) -> str | None:
        """Return the name of a mesh that is equal to this one; None if there is none."""
        return self._meshes.get(mesh)

    def add_others(self, found: Iterable[tuple[str, Any]]) -> None:
        """Note those of these objects that have no name yet, for containers that refer to them later."""
        for name, obj in found:
            if self.name_of(obj) is None:
                self.add(name, obj)

    def add_memory(self, obj: Any) -> None:
        """Note that the content of a named tensor or array is kept: later views of the same bytes refer to it."""
        if is_data(obj) and (memory := memory_of(obj)):
            name = self._names[id(obj)]
            insort(self._memory[memory], (start_of(obj), name))
            if has_whole_memory(obj):
                self._whole.setdefault(memory, name)

    def base_of(self, obj: Any, memory: Memory) -> str | None:
        """Return the name of another tensor or array that has all bytes of `obj`, whose memory this is; None if there is none."""
        found = self._memory.get(memory, ())
        end = bisect_right(found, start_of(obj), key=itemgetter(0)) if found else 0
        tried = [name for _, name in reversed(found[max(0, end - _MOST_TRIED) : end])]
        if memory in self._whole:
            tried.append(self._whole[memory])
        for name in tried:
            other = self.named(name)
            if other is not None and other is not obj and memory_of(other) == memory and covers(other, obj):
                return name
        return None

    def in_memory(self, memory: Memory) -> Iterator[Any]:
        """Yield the tensors and arrays in this memory whose content is kept."""
        for _, name in self._memory.get(memory, ()):
            other = self.named(name)
            if other is not None and memory_of(other) == memory:
                yield other

    def name_of(self, obj: Any) -> str | None:
        """Return the name of an object; None if it was made later."""
        name = self._names.get(id(obj))
        return name if name is not None and self.named(name) is obj else None

    def name_at(self, identity: int) -> str | None:
        """Return the name of the object that has this identity; None if there is none."""
        name = self._names.get(identity)
        return name if name is not None and id(self.named(name)) == identity else None

    def named(self, name: str) -> Any:
        """Return the object; None if this process has none of that name."""
        found = self._objects.get(name)
        return found() if type(found) is weakref.ReferenceType else found

    def has_content(self, name: str) -> bool:
        """Return whether an object other than data was noted with its content, not only by name."""
        return type(self._objects.get(name)) is not weakref.ReferenceType

    def get(self, name: str) -> Any:
        """Return the object. Raises `KeyError` if this process has none of that name."""
        found = self.named(name)
        if found is None:
            raise KeyError(name)
        return found
