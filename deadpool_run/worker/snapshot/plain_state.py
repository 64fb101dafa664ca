"""State of optimizers that is no tensor with a place of its own, such as counts, lists and settings, as it was when a step ended."""

from collections import OrderedDict, deque
from typing import Any

import torch
from torch import Tensor

from deadpool_run.worker.codec import ATOMS, is_simple, simple_object, table_of
from deadpool_run.worker.compat.modules import local, writes_of
from deadpool_run.worker.state.optimizers import NO_PLAIN
from deadpool_run.worker.state.protected import Protected

_DICTS, _LISTS = (dict, OrderedDict), (list, tuple)
_IMMUTABLE = ATOMS | {torch.Size}


class PlainState:
    """A copy of the containers in this state. The tensors in it are not copied: the copy thread does that."""

    def __init__(self, protected: Protected, names: dict[int, str], *, has_any: bool) -> None:
        """`names` are the parameters' names by identity. Without `has_any`, all optimizers keep only tensors."""
        outline = _Outline()
        self.values = outline.taken(protected, names) if has_any else dict.fromkeys(protected.optimizers, NO_PLAIN)
        """The state of each optimizer, as of `OptimizerState.plain`."""
        self._has_any = has_any
        self._tensors = [tensor for tensor in map(local, outline.tensors) if not tensor.is_inference()]
        self._writes = self._write_counts()

    def was_written(self) -> bool:
        """Return whether one of the tensors has been written since."""
        return self._write_counts() != self._writes

    def is_still(self, protected: Protected, names: dict[int, str]) -> bool:
        """Return whether the state is as it was. False if it has objects that may have changed unseen."""
        if not self._has_any:
            return True
        now = _Outline().taken(protected, names)
        return not self.was_written() and all(
            _are_same(self.values[name][part], now[name][part]) for name in now for part in ("state", "shared")
        )

    def _write_counts(self) -> list[int]:
        return list(map(writes_of, self._tensors))


class _Outline:
    """Copies the containers and objects in trees, each once."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}
        """Objects and their copies, by identity."""
        self.tensors: list[Tensor] = []

    def taken(self, protected: Protected, names: dict[int, str]) -> dict[str, Any]:
        """Return a copy of this state of each optimizer."""
        return {name: self.of(optimizer.plain(names)) for name, optimizer in protected.optimizers.items()}

    def of(self, tree: Any) -> Any:
        """Return a copy of the containers and objects in a tree, and note its tensors."""
        kind = type(tree)
        if kind in _DICTS:
            return kind((key, self.of(value)) for key, value in tree.items())
        if kind is deque:
            return deque(map(self.of, tree), tree.maxlen)
        if kind in _LISTS:
            return kind(map(self.of, tree))
        if isinstance(tree, Tensor):
            self.tensors.append(tree)
        elif kind not in _IMMUTABLE and is_simple(kind):
            return self._object(kind, tree)
        return tree

    def _object(self, kind: type, value: Any) -> Any:
        if id(value) not in self._made:
            made = simple_object(kind, {})
            self._made[id(value)] = value, made  # what is in it may refer to it
            table_of(made).update((name, self.of(each)) for name, each in table_of(value).items())
        return self._made[id(value)][1]


def _are_same(one: Any, other: Any) -> bool:
    """Return whether two trees have equal containers with the same tensors and equal values."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in _DICTS:
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if kind in _LISTS or (kind is deque and one.maxlen == other.maxlen):
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, Tensor):
        return one is other
    if kind not in _IMMUTABLE and is_simple(kind):
        return _are_same(table_of(one), table_of(other))
    return kind in _IMMUTABLE and repr(one) == repr(other)  # zeros have signs
