"""The memory of the tensors and arrays that are written together: which are views of others, and which cannot be kept."""

from collections import defaultdict
from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor

from deadpool_run.worker.variables.values.lost import MOVED, OVERLAPS
from deadpool_run.worker.variables.values.objects import Objects, UnkeptDataError
from deadpool_run.worker.variables.values.tensors import TensorCopies
from deadpool_run.worker.variables.values.views import (
    Memory,
    base_of,
    covers,
    do_overlap,
    has_whole_memory,
    may_be_view,
    memories_of,
    memory_of,
    tensor_under,
)


class Sharing:
    """The memory of the tensors and arrays that a writer writes."""

    def __init__(self, made: Mapping[int, tuple[int, Any]], copies: TensorCopies) -> None:
        """`made` are the objects that were made after the loop began, by identity, each with its number."""
        self._made, self._copies = made, copies
        self._whole: dict[Memory, int] = {}
        """The identities of those that have all of their memory."""
        self._parts: defaultdict[Memory, list[Any]] = defaultdict(list)
        """Those that were written without a base."""

    def note(self, value: Any) -> None:
        """Note that the content of an object in `made` was written: later views of its memory refer to it."""
        if (memory := memory_of(value)) and has_whole_memory(value):
            self._whole[memory] = id(value)

    def owner_of(self, objects: Objects, value: Any) -> tuple[str, Any] | None:
        """Return what a view refers to: the number or the name of an object with its memory; None if there is none."""
        for memory in memories_of(value) if may_be_view(value) else ():
            if (name := objects.base_of(value, memory)) is not None:
                return "is", name
            found = self._made.get(self._whole.get(memory, 0))
            if found is not None and covers(found[1], value):
                return "same", found[0]
        return None

    def base_of_new(self, objects: Objects, value: Any) -> Any:
        """Return the tensor or array to write before a view that was made after the loop began; None if it needs none.

        Raises `UnkeptDataError` if the value would no longer share memory with another one.
        """
        memories = memories_of(value) if may_be_view(value) else []
        if not memories:
            return None
        if isinstance(value, Tensor):
            if self._copies.is_other(value):
                return None
        elif (under := tensor_under(value)) is not None and self._copies.is_other(under):
            raise UnkeptDataError(MOVED)
        made = (each for memory in memories for each in self._parts[memory] if id(each) in self._made)
        named = (each for memory in memories for each in objects.in_memory(memory))
        if any(do_overlap(value, each) for each in chain(made, named)):
            raise UnkeptDataError(OVERLAPS)
        base = base_of(value)
        if base is None:
            self._parts[memories[0]].append(value)
        return base

    def check(self, value: Any) -> None:
        """Raise `UnkeptDataError` if a value has memory to which a protected tensor was moved."""
        tensor = value if isinstance(value, Tensor) else tensor_under(value)
        if tensor is not None and self._copies.has_moved(tensor):
            raise UnkeptDataError(MOVED)
