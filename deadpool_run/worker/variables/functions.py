"""Values that the script's functions hold: defaults of parameters, attributes, and arguments of partial calls."""

from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from deadpool_run.worker.variables.library_values import is_immutable

_CONSTANT = (type(None), bool, int, float, complex, str, bytes, type, FunctionType, BuiltinFunctionType, ModuleType)


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
    return isinstance(value, _CONSTANT) or is_immutable(value)


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
