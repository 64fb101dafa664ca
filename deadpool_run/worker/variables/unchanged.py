"""Which values are as they were, by the identities of what is in them: much cheaper than to write them again in each step."""

import operator
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from typing import Any

from deadpool_run.worker.codec import table_of
from deadpool_run.worker.variables.modules import LEAVES
from deadpool_run.worker.variables.values.kinds.functions import is_code
from deadpool_run.worker.variables.values.kinds.library_values import is_immutable
from deadpool_run.worker.variables.values.kinds.own_objects import container_of, is_own, is_plain
from deadpool_run.worker.variables.values.tensors import is_data

_LISTS, _DICTS = frozenset({list, tuple, set, frozenset, deque}), frozenset({dict, OrderedDict})
_MOST = 256
"""Containers and objects in one value."""

_WITH_CONTENT = frozenset({*sys.stdlib_module_names, "numpy", "torch"})
"""Packages whose objects may be kept with their content, which may change in place."""

Parts = tuple[tuple[Any, type, Any, tuple[Any, ...]], ...]
"""The containers and objects in a value, each with its class, the one of Python's containers from which that derives, and what was in it."""


def parts_of(value: Any, own: Collection[str], is_kept: Callable[[Any], bool]) -> Parts | None:
    """Return what has to stay the same for a value to be as it is; None if something in it may change unseen.

    `own` are the script's modules. What is in an object that `is_kept` is somewhere else in a snapshot.
    """
    found: dict[int, tuple[Any, type, Any, tuple[Any, ...]]] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        kind = type(each)
        if kind in LEAVES or id(each) in found or is_immutable(each) or (each is not value and is_kept(each)):
            continue
        # A `defaultdict` has a default beside its items.
        base = None if issubclass(kind, defaultdict) else container_of(kind, own, libraries=True)
        is_readable = kind in _LISTS or kind in _DICTS or (is_own(kind, own) and is_plain(kind)) or base is not None
        if not is_readable or len(found) == _MOST:
            return None
        items = _items_of(each, base)
        found[id(each)] = each, kind, base, items
        waiting += items
    return tuple(found.values())


def are_same(parts: Parts) -> bool:
    """Return whether every container and object has what it had. Takes a microsecond for each."""
    for each, kind, base, items in parts:
        now = _items_of(each, base)
        if type(each) is not kind or len(now) != len(items) or not all(map(operator.is_, now, items)):
            return False
    return True


def is_fixed(value: Any, own: Collection[str], is_scope: Callable[[object], bool]) -> bool:
    """Return whether no content of a value that snapshots keep can change in place. `own` are the script's modules."""
    kind = type(value)
    if kind is tuple:
        return all(type(each) in LEAVES for each in value)
    has_content = kind.__module__ in own or kind.__module__.partition(".")[0] in _WITH_CONTENT
    is_plain = kind in LEAVES or is_immutable(value) or is_code(value)
    return is_plain or is_scope(value) or not has_content


def may_be_dropped(value: Any) -> bool:
    """Return whether nothing ends with a value: it is data, or a container of data. Other values may keep a pool of threads alive."""
    return _is_data(value) or (type(value) in _LISTS | _DICTS and all(map(_is_data, _items_of(value))))


def _is_data(value: Any) -> bool:
    return type(value) in LEAVES or is_data(value)


def _items_of(value: Any, base: Any = None) -> tuple[Any, ...]:
    """Return what is in a container, and the attributes of any other object with their names.

    `base` is the class of Python's from which a container's class derives, and reads it.
    """
    kind = type(value)
    if kind in _LISTS:
        return tuple(value)
    if kind in _DICTS:
        return (*value, *value.values())
    table = table_of(value)
    attributes = (*table, *table.values())
    if base is None:
        return attributes
    return (*attributes, *base.__iter__(value), *(base.values(value) if issubclass(base, dict) else ()))
