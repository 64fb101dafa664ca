"""Variables that scripts attach to modules, parameters, optimizers and protected objects: attributes, buffers, and hooks."""

import dis
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from itertools import chain
from operator import is_, itemgetter
from types import CodeType, FunctionType, MethodType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from deadpool_run.worker.codec import attributes_of
from deadpool_run.worker.compat.modules import (
    buffers_of,
    comm_hooks,
    hook_states,
    hooks_of_tensor,
    inside_compiled,
    name_inside,
)
from deadpool_run.worker.state.hooks import is_unknown
from deadpool_run.worker.variables.values.kinds.functions import is_code
from deadpool_run.worker.variables.values.kinds.library_values import is_immutable

Owner = TypeVar("Owner")

LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes})
OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module: its tables of parameters, buffers, children and hooks, and its mode."""
OF_OPTIMIZERS = frozenset(vars(torch.optim.SGD([torch.zeros(())])))
"""Attributes of every optimizer: its state, groups and hooks."""
_STORE = dis.opmap["STORE_ATTR"]
_HOOKS = "_hooks"
_MOST_PARTS = 256


class AttributeTable:
    """A reader of the variables in a table of attributes. A function or class is one only while it is not what it was at first: there are many."""

    def __init__(self, table: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
        self._table = table
        self._ignored = ignored
        self._size = -1
        self._names: list[str] = []
        self.code = {name: value for name, value in self.all().items() if is_code(value)}
        """The functions and classes that it had at first."""
        self._changed_code = _finder_of_changes(self.code)

    @property
    def identity(self) -> int:
        """The identity of the table."""
        return id(self._table)

    def __call__(self) -> dict[str, Any]:
        """Return the variables."""
        found = self._table
        if len(found) != self._size:
            self._names = [name for name in self.all() if name not in self.code]
            self._size = len(found)
        variables = {name: found[name] for name in self._names if name in found}
        if self.code:
            variables.update(self._changed_code(found))
        return variables

    def all(self) -> dict[str, Any]:
        """Return the variables, and all functions and classes."""
        pairs = list(self._table.items())
        return {name: value for name, value in pairs if not (is_of_python(name) or name in self._ignored)}


def is_of_python(name: str) -> bool:
    """Return whether Python reserves a name, as `__doc__`. Scripts may begin one with two underscores."""
    return name.startswith("__") and name.endswith("__")


def _finder_of_changes(first: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """Return a function that returns the values of a table that are not as in this one; without those that are gone."""
    get, values = _values_getter(first), list(first.values())

    def changed(table: Mapping[str, Any]) -> dict[str, Any]:
        with suppress(KeyError):  # one is gone
            if all(map(is_, get(table), values)):
                return {}
        return {name: table[name] for name, value in first.items() if name in table and table[name] is not value}

    return changed


class _Fixed(NamedTuple):
    """A table whose values never change in place."""

    number: int
    table: Mapping[str, Any]
    values_of: Callable[[Mapping[str, Any]], Iterable[Any]]
    """Returns the present values of the variables in such a table. Raises `KeyError`."""
    first: tuple[Any, ...]
    """Their values at first."""
    size: int
    """Its length at first."""
    holder: Any
    """The object that may exchange it; None if none may."""

    def has_changed(self) -> bool:
        if len(self.table) != self.size or (self.holder is not None and vars(self.holder) is not self.table):
            return True
        try:
            return not all(map(is_, self.values_of(self.table), self.first))
        except KeyError:  # a variable was deleted
            return True


class FixedTables(Generic[Owner]):
    """Tables whose values never change in place. Finds changed tables cheaply: there are thousands, in each step."""

    def __init__(self) -> None:
        self._owners: list[Owner] = []
        self._fixed: list[_Fixed] = []
        self._changed: list[int] = []
        """The numbers of the tables that were not as at first in some step."""
        self._note()

    def add(self, owner: Owner, table: Mapping[str, Any], names: Collection[str], holder: Any = None) -> None:
        """Note a table, the names in it that are variables, and their present values; and the object whose `__dict__` it is, if that may be another later."""
        first = tuple(table[name] for name in names)
        self._fixed.append(_Fixed(len(self._owners), table, _values_getter(names), first, len(table), holder))
        self._owners.append(owner)
        self._is_noted = False

    def __iter__(self) -> Iterator[Owner]:
        """Return the owners of all tables."""
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)

    def cut(self, length: int) -> None:
        """Forget all tables but the first ones."""
        del self._owners[length:]
        self._fixed = [each for each in self._fixed if each.number < length]
        self._changed = [number for number in self._changed if number < length]
        self._is_noted = False

    def changed(self) -> Iterator[Owner]:
        """Return the owners of the tables that may have changed since they were added: those that were not as at first in some step."""
        if not self._is_noted:
            self._note()
        if not self._are_as_at_first():
            changed = {each.number for each in self._fixed if each.has_changed()}
            self._changed = sorted([*self._changed, *changed])
            self._fixed = [each for each in self._fixed if each.number not in changed]
            self._note()
        return map(self._owners.__getitem__, self._changed)

    def _are_as_at_first(self) -> bool:
        try:
            values = chain.from_iterable([each.values_of(each.table) for each in self._with_values])
        except KeyError:
            return False
        return (
            list(map(len, self._tables)) == self._sizes
            and all(map(is_, values, self._values))
            and all(map(is_, map(vars, self._holders), self._held))
        )

    def _note(self) -> None:
        """Lay the tables that have not changed out so that all are looked at in a few calls."""
        self._tables = [each.table for each in self._fixed]
        self._sizes = [each.size for each in self._fixed]
        self._with_values = [each for each in self._fixed if each.first]
        self._values = [*chain.from_iterable(each.first for each in self._with_values)]
        held = [each for each in self._fixed if each.holder is not None]
        self._holders, self._held = [each.holder for each in held], [each.table for each in held]
        self._is_noted = True


def _values_getter(names: Collection[str]) -> Callable[[Mapping[str, Any]], Iterable[Any]]:
    if len(names) > 1:
        return itemgetter(*names)
    return lambda table: [table[name] for name in names]


def small_attributes_of(obj: object) -> dict[str, Any]:
    """Return the small attributes of a protected object, because its `state_dict()` may lack them."""
    return {name: value for name, value in attributes_of(obj).items() if _is_small(value)}


def _is_small(value: Any) -> bool:
    """Return whether a value is a number, a string, an immutable library value, or a small container of numbers and strings."""
    kind = type(value)
    if kind in (list, tuple, set, frozenset):
        return len(value) <= _MOST_PARTS and all(type(each) in LEAVES for each in value)
    if kind is dict:
        return len(value) <= _MOST_PARTS and all(type(each) in LEAVES for pair in value.items() for each in pair)
    return kind in LEAVES or is_immutable(value)


def is_wrapper(obj: object) -> bool:
    """Return whether an object is torch's wrapper of a module of the script."""
    return isinstance(obj, DistributedDataParallel) or (isinstance(obj, nn.Module) and inside_compiled(obj) is not None)


def ignored_in(owner: object) -> Collection[str]:
    """Return the attributes of a module, an optimizer or a tensor that are torch's own, and kept by other means if at all.

    `torch.compile` passes all attributes that a script sets on to the module inside.
    """
    if isinstance(owner, DistributedDataParallel):
        return _set_by_torch(type(owner))
    if isinstance(owner, Tensor):
        inside = name_inside(owner)
        return () if inside is None else (inside,)
    if not isinstance(owner, nn.Module):
        return OF_OPTIMIZERS
    return OF_MODULES if inside_compiled(owner) is None else vars(owner)


@cache
def _set_by_torch(kind: type) -> frozenset[str]:
    """Return the names of the attributes that torch's methods of a class set."""
    of_torch = [vars(base) for base in kind.__mro__ if base.__module__.partition(".")[0] == "torch"]
    codes = (getattr(each, "__code__", None) for table in of_torch for each in table.values())
    return OF_MODULES.union(name for code in codes if code for name in _attributes_set_in(code))


def _attributes_set_in(code: CodeType) -> Iterator[str]:
    """Yield the names of the attributes that a function sets. Does not decode its instructions: that takes 20 ms for those of DDP."""
    operations, arguments = code.co_code[::2], code.co_code[1::2]
    for at in stores_among(operations):
        number, before, bits = arguments[at], at - 1, 8
        while before >= 0 and operations[before] == dis.EXTENDED_ARG:
            number |= arguments[before] << bits
            before, bits = before - 1, bits + 8
        yield code.co_names[number]


def stores_among(operations: bytes) -> Iterator[int]:
    """Yield the places of those operations of a function that set an attribute."""
    at = operations.find(_STORE)
    while at >= 0:
        yield at
        at = operations.find(_STORE, at + 1)


def buffers_to_keep(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the table of a module's own buffers, if nothing in the module can be trained."""
    found = buffers_of(module)
    return {} if found and _is_trained(module) else found


def attributed_buffers_of(owner: object) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own buffers, to which a script may have attached attributes, by name."""
    for name, buffer in buffers_of(owner).items() if isinstance(owner, nn.Module) else ():
        if buffer is not None:
            yield name, buffer


def _is_trained(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def submodules_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and its submodules, each once, by path: `.layers.0` is in `.layers`."""
    return ((f".{path}" if path else "", each) for path, each in module.named_modules())


def hooks_of(obj: Any) -> Iterator[tuple[str, Any]]:
    """Yield the hooks of a module, a tensor or an optimizer, each with a name."""
    tables = hooks_of_tensor(obj) if isinstance(obj, Tensor) else vars(obj)
    for key, hooks in list(tables.items()):
        if key.endswith(_HOOKS) and isinstance(hooks, Mapping):
            for number, hook in enumerate(list(hooks.values())):
                yield f"{key}[{number}]", hook
    if isinstance(obj, DistributedDataParallel):
        for number, (hook, state) in enumerate(zip(comm_hooks(obj), hook_states(obj), strict=True)):
            yield f"communication hook[{number}]", hook
            if is_unknown(state):
                yield f"the state of communication hook[{number}]", state


def functions_of(obj: object, depth: int = 2) -> Iterator[tuple[str, Any]]:
    """Yield the functions in attributes of a protected object, also in lists, and those of schedulers inside it."""
    for key, value in attributes_of(obj).items():
        for number, each in enumerate(value if type(value) in (list, tuple) else [value]):
            name = f"{key}[{number}]" if type(value) in (list, tuple) else key
            if isinstance(each, (FunctionType, MethodType, partial)):
                yield name, each
            elif depth and isinstance(each, LRScheduler):
                yield from ((f"{name}.{inner}", function) for inner, function in functions_of(each, depth - 1))
