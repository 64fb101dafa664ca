"""State of optimizers that is no tensor with a place of its own, such as counts, lists and settings, as it was when a step ended."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from deadpool_run.worker.codec import ATOMS, tensors_in
from deadpool_run.worker.compat.modules import local, writes_of
from deadpool_run.worker.state.optimizers import NO_PLAIN
from deadpool_run.worker.state.protected import Protected

_DICTS, _LISTS = (dict, OrderedDict), (list, tuple)
_IMMUTABLE = ATOMS | {torch.Size}


class PlainState:
    """A copy of the containers in this state. The tensors in it are not copied: the copy thread does that."""

    def __init__(self, protected: Protected, names: dict[int, str], *, has_any: bool) -> None:
        """`names` are the parameters' names by identity. Without `has_any`, all optimizers keep only tensors."""
        self.values = _taken(protected, names) if has_any else dict.fromkeys(protected.optimizers, NO_PLAIN)
        """The state of each optimizer, as of `OptimizerState.plain`."""
        self._has_any = has_any
        own = map(local, tensors_in(self.values)) if has_any else ()
        self._tensors = [tensor for tensor in own if not tensor.is_inference()]
        self._writes = self._write_counts()

    def was_written(self) -> bool:
        """Return whether one of the tensors has been written since."""
        return self._write_counts() != self._writes

    def is_still(self, protected: Protected, names: dict[int, str]) -> bool:
        """Return whether the state is as it was. False if it has objects that may have changed unseen."""
        if not self._has_any:
            return True
        now = _taken(protected, names)
        return not self.was_written() and all(
            _are_same(self.values[name][part], now[name][part]) for name in now for part in ("state", "shared")
        )

    def _write_counts(self) -> list[int]:
        return list(map(writes_of, self._tensors))


def _taken(protected: Protected, names: dict[int, str]) -> dict[str, Any]:
    return {name: _outline(optimizer.plain(names)) for name, optimizer in protected.optimizers.items()}


def _outline(tree: Any) -> Any:
    """Return a copy of the containers in a tree."""
    kind = type(tree)
    if kind in _DICTS:
        return kind((key, _outline(value)) for key, value in tree.items())
    return kind(map(_outline, tree)) if kind in _LISTS else tree


def _are_same(one: Any, other: Any) -> bool:
    """Return whether two trees have equal containers with the same tensors and equal values."""
    kind = type(one)
    if kind is not type(other):
        return False
    if kind in _DICTS:
        return one.keys() == other.keys() and all(_are_same(one[key], other[key]) for key in one)
    if kind in _LISTS:
        return len(one) == len(other) and all(map(_are_same, one, other))
    if isinstance(one, Tensor):
        return one is other
    return kind in _IMMUTABLE and repr(one) == repr(other)  # zeros have signs
