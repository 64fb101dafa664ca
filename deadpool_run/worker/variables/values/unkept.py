"""Data in variables that snapshots do not keep: checks for changes, and stand-ins for lost values.

Most lost values are never read again: a batch, a loss, a list for a plot. So the variable gets a `LostValue`, and only a script
that uses it is refused.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor

from deadpool_run.worker.compat.writes import all_writes_of
from deadpool_run.worker.variables.values.digests import digest_of, digest_of_array
from deadpool_run.worker.variables.values.kinds.functions import unbound
from deadpool_run.worker.variables.values.kinds.iterators import is_iterator, progress_of
from deadpool_run.worker.variables.values.lost import OVERLAPS, LostValue
from deadpool_run.worker.variables.values.objects import OpaqueError
from deadpool_run.worker.variables.values.tensors import SAMPLES, is_array, is_data, is_scalar, sample_of_array

_CONTAINERS = (list, tuple, dict, set, frozenset, deque)
LEAVES = (type(None), bool, int, float, complex, str, bytes)
_MOST_PARTS = 4096
_DEEPEST = 4


class Unkept:
    """A record of a value that is not kept, to detect later changes. It does not keep tensors alive."""

    def __init__(self, value: Any, why: str, *, inside: bool = False, arrays: bool = False) -> None:
        """`why` is the reason why it is not kept. With `inside` and `arrays`, later changes to these are detected (`is_still`)."""
        value = unbound(value)
        self.why = why
        self._parts = list(_parts(value))
        self._size, self._last = _size(value), _last(value)
        self.inside, self.cost = digest_of(value) if inside else (None, 0)
        self._arrays = _digests_of_arrays(value) if arrays else None
        self._id = id(value)
        self._alive = (
            value if _size(value) and type(self._last) in LEAVES else None
        )  # no other object gets its identity
        self.is_iterator = type(value) is not LostValue and is_iterator(value)
        self._source = _weak(value) if self.is_iterator else _weak_or_none(value)
        self._progress = progress_of(value) if self.is_iterator else None

    def is_still(self, value: Any, *, inside: bool = False, thorough: bool = False) -> bool:  # noqa: PLR0911 - one line for each sign
        """Return whether the value is the same object, and no change can be detected.

        `inside` also looks at the numbers, texts and objects in it, which has a `cost`, and `thorough` at all bytes of arrays as well.
        """
        value = unbound(value)
        if self.is_iterator:
            return self._is(value) and progress_of(value) == self._progress
        if self._source is not None and self._source() is not value:
            return False
        if type(value) in _CONTAINERS and (id(value) != self._id or _size(value) != self._size):
            return False
        parts = list(_parts(value))
        if len(parts) != len(self._parts) or not all(map(_is_same_part, self._parts, parts)):
            return False
        if not _is_same_last(self._last, _last(value)):
            return False
        if (inside or thorough) and self.inside is not None and digest_of(value)[0] != self.inside:
            return False
        return not thorough or self._arrays is None or _digests_of_arrays(value) == self._arrays

    def differs_inside(self, later: "Unkept") -> bool:
        """Return whether a later record of the same value shows a change inside it."""
        return None not in (self.inside, later.inside) and self.inside != later.inside

    def is_of(self, value: Any) -> bool:
        """Return whether the value is the same object, even if its content has changed."""
        value = unbound(value)
        if self._source is not None:
            return self._is(value)
        if type(value) in _CONTAINERS:
            return id(value) == self._id
        return len(self._parts) == 1 and self._parts[0][0]() is value

    @property
    def has_unknown_progress(self) -> bool:
        """True for an iterator whose class does not show its position."""
        return self.is_iterator and self._progress is None

    def _is(self, iterator: Any) -> bool:
        return self._source is not None and self._source() is iterator

    def undo(self, value: Any) -> bool:
        """Remove what was appended to a list since then. Return whether the value is as it was."""
        if self.why == OVERLAPS:  # the other variable gets memory of its own
            return False
        value = unbound(value)
        has_grown = type(value) is list and id(value) == self._id and 0 < self._size < len(value)
        if has_grown and _is_same_last(self._last, _mark(value[self._size - 1])):
            del value[self._size :]
        return (self._arrays is not None or not _has_large_arrays(value)) and self.is_still(value, thorough=True)


class _LostGraph(torch.autograd.Function):
    """A graph for a value whose own graph was lost. Its backward raises."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, value: Tensor, refuse: Callable[[str], NoReturn]) -> Tensor:
        ctx.refuse = refuse
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        refuse: Callable[[str], NoReturn] = ctx.refuse
        refuse(
            "a backward goes through the graph of an earlier step, and a snapshot does not hold graphs: it holds the value of a tensor "
            "in a variable only.\nCall backward() on each loss in its own step, or detach() what later steps read."
        )


def has_graph(value: Tensor) -> bool:
    """Return whether a tensor has a graph. Raises `OpaqueError` if that is not known."""
    try:
        return value.grad_fn is not None
    except RuntimeError as error:  # a view of memory that was written to since, as in FSDP1
        raise OpaqueError from error


def with_lost_graph(value: Tensor, refuse: Callable[[str], NoReturn]) -> Tensor:
    """Return a tensor with this value. A backward through it calls `refuse`."""
    with torch.enable_grad():
        found: Tensor = _LostGraph.apply(torch.zeros((), requires_grad=True), value, refuse)
    return found


def _size(value: Any) -> int:
    return len(value) if type(value) in _CONTAINERS else 0


def _last(value: Any) -> Any:
    if not _size(value) or type(value) in (set, frozenset):
        return None
    return _mark(next(reversed(value.values())) if type(value) is dict else value[-1])


def _weak(value: Any) -> Callable[[], Any]:
    """Return a function that returns the value: a weak reference, if its class allows one."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value


def _weak_or_none(value: Any) -> Callable[[], Any] | None:
    """Return a weak reference to an object that is no data and no container, if its class allows one."""
    if type(value) in (*_CONTAINERS, *LEAVES) or is_data(value):
        return None
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def _mark(part: Any) -> Any:
    """Return the part itself if it is plain, else its identity, which does not keep it alive."""
    return part if type(part) in LEAVES else (id(part),)


def _is_same_last(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) is tuple and bool(one == other))


def _parts(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yield weak references to the tensors and arrays in a value, each with a mark that changes with each write."""
    if issubclass(type(value), Tensor):  # false for a weak proxy
        yield weakref.ref(value), all_writes_of(value)
    elif is_array(value) and not is_scalar(value):
        yield weakref.ref(value), sample_of_array(value)
    elif type(value) in _CONTAINERS and depth < _DEEPEST and len(value) <= _MOST_PARTS:
        for part in list(value.values() if type(value) is dict else value):
            yield from _parts(part, depth + 1)


def _is_same_part(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    return one[0]() is other[0]() and one[1] == other[1] and one[1] != -1


def _arrays_in(value: Any) -> Iterator[Any]:
    return (part for source, _ in _parts(value) if is_array(part := source()))


def _digests_of_arrays(value: Any) -> list[int | None]:
    return [digest_of_array(each) for each in _arrays_in(value)]


def _has_large_arrays(value: Any) -> bool:
    """Return whether a sample of an array in the value may not show a change."""
    return any(each.size > SAMPLES and each.flags.writeable for each in _arrays_in(value))
