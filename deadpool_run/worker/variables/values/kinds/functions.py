"""Functions as values of variables, and the values that they hold: defaults of parameters, attributes, arguments of partial calls."""

import random
import sys
from collections.abc import Collection, Mapping
from functools import cached_property, partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

from deadpool_run.worker.variables.values.kinds.library_values import is_immutable

CODE = (FunctionType, BuiltinFunctionType, type, ModuleType)
_BOUND_IN_C = frozenset({BuiltinFunctionType, MethodWrapperType})
_IN_C = (MethodDescriptorType, WrapperDescriptorType)
_IN_CYTHON = "cython_function_or_method"
"""The class of methods of NumPy's generators."""
_OF_RANDOM: Any = random.random
_CONSTANT = (type(None), bool, int, float, complex, str, bytes, *CODE)
_HARMLESS = ("torch.nn.", "torch.optim.")
"""Begin the names of modules of which every function and class may be named. A snapshot may come from a file: it cannot name any other."""


def name_of_code(value: Any, own: Collection[str]) -> tuple[str, str] | None:
    """Return the Python module, and the name in it, by which every process finds a function or a class; None if by none.

    `own` are the script's Python modules.
    """
    places = [(getattr(value, "__module__", None) or "", getattr(value, "__qualname__", ""))]
    if isinstance(value, BuiltinFunctionType):  # it does not name its module, or one behind these
        places += [(module, value.__name__) for module in ("torch", "torch.nn.functional")]
    return next((place for place in places if code_of_name(*place, own) is value), None)


def code_of_name(module: str, name: str, own: Collection[str]) -> Any:
    """Return the function or class of this name in a Python module; None if there is none, or none that may be named."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
        if isinstance(found, ModuleType):
            return None
    if isinstance(found, BuiltinFunctionType):
        return found if module in ("torch", "torch.nn.functional", "math") else None
    may_be_named = module in own or module.startswith(_HARMLESS) or (module == "builtins" and isinstance(found, type))
    may_be_named = may_be_named or (module == "numpy" and _is_class_of_numbers(found))
    is_there = isinstance(found, CODE) and found.__module__ == module  # not imported from another one
    return found if may_be_named and is_there else None


def name_of_variables(value: Any) -> str | None:
    """Return the Python module whose variables a dict has, as that of `builtins` in the globals of compiled code; None for any other."""
    name = value.get("__name__") if type(value) is dict and "__spec__" in value else None
    found = sys.modules.get(name) if isinstance(name, str) else None
    return name if found is not None and vars(found) is value else None


def _is_class_of_numbers(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, sys.modules["numpy"].generic)


def name_of_method(method: Any) -> str | None:
    """Return the name under which `bound` makes the method; None if there is none. Also for methods written in C."""
    name = getattr(method, "__name__", "")
    return name if bound(method.__self__, name) == method else None


def bound(owner: Any, name: str) -> Any:
    """Return a method of an object's class, bound to the object; of a class itself, what the class binds. None if it has no such method."""
    found: Any = getattr(owner if isinstance(owner, type) else type(owner), name, None)
    if isinstance(owner, type):
        return found if isinstance(found, MethodType) else None
    if isinstance(found, FunctionType) or (type(found).__name__ == _IN_CYTHON and not _is_shared(owner)):
        return MethodType(found, owner)
    return found.__get__(owner) if isinstance(found, _IN_C) else None


def is_bound_in_c(value: Any) -> bool:
    """Return whether a value is a method that is written in C, such as `random.Random(5).random`: its object is the script's."""
    if type(value) not in _BOUND_IN_C:
        return False
    owner = value.__self__
    is_of_module = owner is None or isinstance(owner, ModuleType | type) or _is_shared(owner)
    return not is_of_module and name_of_method(value) is not None


def unbound(value: Any) -> Any:
    """Return the object of a method that is written in C; any other value itself."""
    return value.__self__ if is_bound_in_c(value) else value


def is_code(value: Any) -> bool:
    """Return whether a value is a function, a class or a Python module, and has no object that may change."""
    return isinstance(value, CODE) and not is_bound_in_c(value)


def _is_shared(owner: Any) -> bool:
    """Return whether an object is the generator of `random` or of `numpy.random`, which is kept by other means."""
    numpy = sys.modules.get("numpy.random.mtrand")
    return owner is _OF_RANDOM.__self__ or (numpy is not None and owner is numpy.rand.__self__)


def cells_of(value: Any, own: Collection[str]) -> list[Any]:
    """Return what the closure of a function of the script's modules holds; an empty list if a part has no value yet."""
    if not isinstance(value, FunctionType) or value.__module__ not in own:
        return []
    try:
        return [cell.cell_contents for cell in value.__closure__ or ()]
    except ValueError:
        return []


def functions_in(attribute: Any) -> list[tuple[str, Any]]:
    """Return the functions in an attribute of a class, such as a property, each with the end of a name."""
    if isinstance(attribute, property):
        return [(".get", attribute.fget), (".set", attribute.fset), (".delete", attribute.fdel)]
    return [
        ("", attribute.func if isinstance(attribute, cached_property) else getattr(attribute, "__func__", attribute))
    ]


class Attributes:
    """The attributes of all functions of the script, by the function's name, a dot and their own."""

    def __init__(self) -> None:
        self._functions: dict[str, FunctionType] = {}

    def add(self, name: str, function: FunctionType) -> None:
        """Add a function under a name."""
        self._functions[name] = function

    def read(self) -> dict[str, Any]:
        """Return the present attributes. Cheap, because most functions have none."""
        return {
            f"{name}.{key}": value
            for name, function in self._functions.items()
            if function.__dict__
            for key, value in list(function.__dict__.items())
            if not key.startswith("__")
        }

    def write(self, values: Mapping[str, Any]) -> None:
        """Set attributes."""
        for name, value in values.items():
            owner, _, key = name.rpartition(".")
            self._functions[owner].__dict__[key] = value

    def remove(self, name: str) -> None:
        """Remove an attribute."""
        owner, _, key = name.rpartition(".")
        self._functions[owner].__dict__.pop(key, None)


def has_changing_defaults(function: FunctionType) -> bool:
    """Return whether a default of a function is an object that may change."""
    values = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return not _is_constant(values)


def _is_constant(value: Any) -> bool:
    if isinstance(value, tuple | frozenset):
        return all(map(_is_constant, value))
    return (isinstance(value, _CONSTANT) and unbound(value) is value) or is_immutable(value)


def defaults_of(function: FunctionType) -> dict[str, Any]:
    """Return the defaults of a function's parameters: positions as numbers, and names."""
    positional = {str(index): value for index, value in enumerate(function.__defaults__ or ())}
    return positional | (function.__kwdefaults__ or {})


def set_defaults(function: FunctionType, values: Mapping[str, Any]) -> None:
    """Set defaults of a function."""
    named = {name: value for name, value in values.items() if not name.isdigit()}
    if named:
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), **named}
    if len(named) < len(values):
        defaults = list(function.__defaults__ or ())
        for name in values.keys() - named.keys():
            defaults[int(name)] = values[name]
        function.__defaults__ = tuple(defaults)


def arguments_of(call: partial[Any]) -> dict[str, Any]:
    """Return the arguments of a partial call: positions as numbers, and names."""
    return {str(index): value for index, value in enumerate(call.args)} | call.keywords


def set_arguments(call: partial[Any], values: Mapping[str, Any]) -> None:
    """Set arguments of a partial call."""
    found = {**arguments_of(call), **values}
    positional = tuple(value for name, value in found.items() if name.isdigit())
    named = {name: value for name, value in found.items() if not name.isdigit()}
    state: Any = call  # its type declares no __setstate__
    state.__setstate__((call.func, positional, named, vars(call) or None))
