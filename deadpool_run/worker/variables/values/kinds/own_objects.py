"""Objects of classes that are written in Python: their attributes, read and set without running code of those classes."""

import enum
import os
import random
import sys
from argparse import Namespace
from collections import ChainMap, OrderedDict, UserDict, UserList, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deadpool_run.ids import is_of_package
from deadpool_run.worker.codec import attributes_of, has_only_attributes, has_table, table_of
from deadpool_run.worker.state import generators
from deadpool_run.worker.variables.values.kinds.library_values import C_DATA
from deadpool_run.worker.variables.values.objects import USED, OpaqueError

_WITH_OTHER_STATE = (
    nn.Module,
    Optimizer,
    Tensor,
    C_DATA,
    BaseException,
    enum.Enum,
    type,
    dict,
    list,
    tuple,
    set,
    frozenset,
    deque,
    str,
    bytes,
    int,
    float,
)
MAKERS: tuple[Any, ...] = (object.__new__, SimpleNamespace.__new__, random.Random.__new__, torch.Generator.__new__)
"""These make an object of a class without arguments."""
_STATE = "(state)"
"""Not an attribute: no attribute has such a name."""
_OF_PYTHON = (Namespace, SimpleNamespace, UserDict, UserList, ChainMap)


def is_own(kind: type, modules: Collection[str]) -> bool:
    """Return whether a class is of one of these modules, and all state of its objects is in attributes."""
    return kind in _OF_PYTHON or (
        kind.__module__ in modules
        and not issubclass(kind, _WITH_OTHER_STATE)
        and kind.__reduce_ex__ is object.__reduce_ex__
    )


_PLAIN_REDUCE: Any = object.__reduce__
_PLAIN_LOOKUP: Any = object.__getattribute__
_MACHINERY = ("torch._", "torch.distributed._", "torch.distributed.fsdp", "torch.distributed.tensor")
"""Packages of torch whose objects belong to a wrapped or compiled model. They are looked after with it."""
_OTHER = frozenset({type(os.environ), WeakKeyDictionary, WeakSet, WeakValueDictionary})
"""The launcher itself writes to the environment. The others are written as containers."""


def has_only_table(kind: type) -> bool:
    """Return whether all state of a class's objects is in `__dict__`, which `vars` returns without running code of the class."""
    return has_only_attributes(kind) and has_table(kind) and kind.__getattribute__ is _PLAIN_LOOKUP


def is_plain(kind: type) -> bool:
    """Return whether all state of a class's objects is in attributes, and none of it belongs to a member of an enumeration or a wrapped model."""
    return (
        has_only_attributes(kind)
        and not issubclass(type(kind), enum.EnumType)
        and not _is_of_machinery(kind)
        and kind not in _OTHER
    )


def _is_of_machinery(kind: type) -> bool:
    return is_of_package(kind.__module__) or kind.__module__.startswith(_MACHINERY)


def is_plain_of_library(kind: type) -> bool:
    """Return whether a class is plain, and neither of Python itself nor one of whose objects only references are written."""
    has_more = hasattr(kind, "__del__") or hasattr(kind, "__next__") or kind.__reduce__ is not _PLAIN_REDUCE
    return is_plain(kind) and _is_of_library(kind) and may_be_made(kind) and not (has_more or issubclass(kind, USED))


def _is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in sys.stdlib_module_names and not _is_of_machinery(kind)


def may_be_made(kind: type) -> bool:
    """Return whether `made` makes an object of the class."""
    maker: Any = kind.__new__
    return maker in MAKERS or (
        isinstance(maker, FunctionType) and not issubclass(kind, random.Random | torch.Generator)
    )


def made(kind: Any) -> Any:
    """Return a new object without attributes. No code of the class is run. Raises `OpaqueError` if a part of it is written in C."""
    try:
        return object.__new__(kind) if isinstance(kind.__new__, FunctionType) else kind.__new__(kind)
    except TypeError as error:
        raise OpaqueError from error


_CONTAINERS: tuple[Any, ...] = (OrderedDict, dict, deque, list, set)
"""Classes whose methods read and fill objects of derived classes. Those of dict serve `Counter` and `defaultdict` too."""


TABLES = frozenset({"_parameters", "_buffers", "_modules"})
"""The attributes of a module with what is inside it, by name."""
_OF_NEW_MODULES: dict[str, Any] = vars(nn.Module())


def attributes_of_module(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module that are not those of every new one."""
    return {name: each for name, each in vars(module).items() if not _is_of_new(name, each)}


def _is_of_new(name: str, value: Any) -> bool:
    if name not in _OF_NEW_MODULES:
        return False
    new = _OF_NEW_MODULES[name]
    return value is new or (type(value) is type(new) and type(value) in (dict, OrderedDict, set) and not value)


def set_attributes_of_module(module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Set what `attributes_of_module` returns, and remove all others."""
    vars(module).clear()
    nn.Module.__init__(module)
    vars(module).update(attributes)


def container_of(kind: type, modules: Collection[str], *, libraries: bool = False) -> Any:
    """Return the class of `_CONTAINERS` from which the script, or a library, derives a container class; None for other classes."""
    if (
        not (kind.__module__ in modules or (libraries and _is_of_library(kind)))
        or issubclass(kind, nn.Module)
        or kind.__dictoffset__ == 0
        or any(vars(each).get("__slots__") for each in kind.__mro__)
    ):
        return None
    base = next((each for each in _CONTAINERS if issubclass(kind, each)), None)
    maker: Any = kind.__new__
    is_plain = base is not None and (maker is base.__new__ or not isinstance(maker, BuiltinFunctionType))
    return base if is_plain and kind.__reduce_ex__ is object.__reduce_ex__ else None


def empty_container(kind: type) -> Any:
    """Return an empty container of such a class. No code of the class is run."""
    makers: Iterator[Any] = (each.__new__ for each in kind.__mro__)
    return next(each for each in makers if isinstance(each, BuiltinFunctionType))(kind)


_PLAIN_VALUES: dict[Any, Callable[[Any], Any]] = {
    int: int.__pos__,
    float: float.__pos__,
    complex: complex.__pos__,
    str: str.__str__,
    bytes: lambda value: bytes.__getitem__(value, slice(None)),
    tuple: lambda value: tuple.__getitem__(value, slice(None)),
    frozenset: frozenset.copy,
}
"""Immutable classes, each with what makes the plain value of a derived class. No code of that class is run."""


def immutable_base_of(kind: Any, modules: Collection[str]) -> Any:
    """Return the class of `_PLAIN_VALUES` from which the script derives a class, such as a number with a unit; None for other classes."""
    if kind.__module__ not in modules or kind.__reduce_ex__ is not object.__reduce_ex__:
        return None
    return next((each for each in kind.__mro__ if each in _PLAIN_VALUES), None)


def plain_value(base: Any, value: Any) -> Any:
    """Return the value of class `base` in an object of a derived class."""
    return _PLAIN_VALUES[base](value)


def are_same(one: Any, other: Any) -> bool:
    """Return whether two plain values have the same numbers and texts, and refer to the same objects otherwise."""
    if type(one) in (tuple, frozenset):
        return type(other) is type(one) and len(one) == len(other) and all(map(are_same, one, other))
    return one is other or (type(one) is type(other) and type(one) in _PLAIN_VALUES and repr(one) == repr(other))


def attributes_of_container(value: Any) -> dict[str, Any]:
    """Return the attributes of a container of the script's; an empty dict if its items are its attributes."""
    found = table_of(value)
    return {} if found is value else dict(found)


def replace_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Set the attributes of an object, and remove all others."""
    table = table_of(value)
    for name in attributes_of(value).keys() - attributes.keys():
        if table.pop(name, table) is table:  # in a slot
            object.__delattr__(value, name)
    set_attributes(value, attributes)


def content_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object of the script's, and the state of a generator, if its class derives from one."""
    kind = generators.kind_inherited(value)
    return attributes_of(value) | ({_STATE: generators.state_of(value, kind)} if kind else {})


def set_attributes(value: Any, attributes: Mapping[str, Any]) -> None:
    """Set what `content_of` returns: attributes of an object, also those in slots and those of frozen data classes."""
    for name, each in attributes.items():
        if name == _STATE:
            generators.set_state(value, each, generators.kind_inherited(value))
            continue
        found = next((vars(base)[name] for base in type(value).__mro__ if name in vars(base)), None)
        if isinstance(found, MemberDescriptorType):
            found.__set__(value, each)
        else:
            vars(value)[name] = each
