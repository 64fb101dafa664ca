"""Containers in variables: what is in them, and the items of a dict as variables."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from types import MethodType
from typing import Any

from deadpool_run.worker.variables.modules import LEAVES

PLAIN = (dict, list, tuple, deque)
_MOST_PARTS = 256
_IN_CONTEXT, _UNSET = "value", object()
OTHERS = "(other keys)"
"""The name under which a dict is that has the items whose keys are not strings, if the loop has added some."""


def is_small(value: Any) -> bool:
    """Return whether a value is a container with so few parts that each is looked at, or a call with arguments.

    The parts of a set have no order that other processes share.
    """
    if isinstance(value, partial):
        return True
    base = _base_of(value)
    return base is not None and base.__len__(value) <= _MOST_PARTS


def parts_in(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what is in such a value, each part with its place in the script's notation. Of a method, the object."""
    for index, (key, part) in enumerate(_items_of(value)):
        where = f"[{repr(key) if type(key) in LEAVES else f'#{index}'}]"
        if isinstance(part, MethodType):
            yield f"{where}.__self__", part.__self__
        elif type(part) not in LEAVES:
            yield where, part


def _base_of(value: Any) -> Any:
    """Return the class of `PLAIN` from which a container derives: its methods run no code of the script's."""
    kind = type(value)
    return next((base for base in PLAIN if issubclass(kind, base)), None)


def _items_of(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, partial):
        return list(enumerate((value.func, *value.args, *value.keywords.values())))
    base = _base_of(value)
    return list(dict.items(value)) if base is dict else list(enumerate(base.__iter__(value)))


def has_only_names(content: Mapping[Any, Any]) -> bool:
    """Return whether all keys are strings."""
    keys: Iterable[Any] = dict.keys(content)  # type: ignore[arg-type] # any class of dicts
    return all(type(key) is str for key in keys)


class DictVariables:
    """The variables of a dict, which the methods of `base` read and set: not those of the script's class."""

    def __init__(self, content: dict[Any, Any], base: Any = dict) -> None:
        self._content, self._base = content, base

    def read(self) -> dict[str, Any]:
        """Return the present items."""
        found: dict[str, Any] = {}
        others: dict[Any, Any] = {}
        for key, value in list(self._base.items(self._content)):
            (found if type(key) is str else others)[key] = value
        return {**found, OTHERS: others} if others else found

    def write(self, values: Mapping[str, Any]) -> None:
        """Set some items; those of other keys all together."""
        found = dict(values)
        if (others := found.pop(OTHERS, None)) is not None:
            self.remove(OTHERS)
            self._base.update(self._content, others)
        self._base.update(self._content, found)

    def remove(self, name: str) -> None:
        """Remove an item, or all items of other keys."""
        for key in (
            [key for key in self._base.keys(self._content) if type(key) is not str] if name == OTHERS else [name]
        ):
            self._base.pop(self._content, key)


def value_in_context(variable: ContextVar[Any]) -> dict[str, Any]:
    """Return the value of a context variable for this thread, if it has one, under a fixed name."""
    value = variable.get(_UNSET)
    return {} if value is _UNSET else {_IN_CONTEXT: value}


def set_in_context(variable: ContextVar[Any], values: Mapping[str, Any]) -> None:
    """Set what `value_in_context` returned."""
    variable.set(values[_IN_CONTEXT])
