"""Scopes of the script's variables: its functions, modules, objects and dicts."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from deadpool_run.worker.codec import attributes_of
from deadpool_run.worker.process.script_files import own_modules
from deadpool_run.worker.variables.frames import (
    closed_over,
    function_frames,
    local_variables,
    script_frames,
    set_local_variables,
)
from deadpool_run.worker.variables.own_objects import is_own, set_attributes
from deadpool_run.worker.variables.values import Objects, OpaqueError, ValueWriter

_MOST_KEYS = 256
"""A dict or a list with more is one value, not a scope."""
_MOST_SCOPES = 4096
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: its tables of parameters, buffers, children and hooks, and its mode."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Some variables of the script, under a name."""

    name: str
    read: Callable[[], Mapping[str, Any]]
    """Returns the present values by variable."""
    write: Callable[[Mapping[str, Any]], None]
    """Sets some variables."""
    remove: Callable[[str], object] | None = None
    """Ends a variable that had no value at a snapshot; None where that makes no difference."""


class Scopes:
    """All scopes, found once: those of objects that the script makes later are parts of values."""

    def __init__(self, excluded: Collection[int], modules: Iterable[tuple[str, nn.Module]]) -> None:
        """`excluded` are identities of objects that are kept otherwise; `modules` are those whose plain attributes are kept."""
        self._excluded = excluded
        sources = {name: vars(module) for name, module, _ in own_modules()}
        for frame in script_frames():
            sources.setdefault(str(frame.f_globals.get("__name__", "")), frame.f_globals)
        self.modules = frozenset(sources)
        self._found: list[Scope] = []
        self._objects = Objects()
        self._functions: set[int] = set()
        for frame_name, frame in function_frames():
            self._search(frame_name, local_variables(frame).items())
        for name, variables in sources.items():
            self._search(name, variables.items())
            self._add(Scope(name, _Variables(variables), variables.update))
        for name, module in modules:
            if any(kind.__module__ in self.modules for kind in type(module).__mro__):
                self._add(Scope(name, _Variables(vars(module), _OF_TORCH), vars(module).update))
        for scope in self._found:  # which grows: scopes are found in scopes
            self._search(scope.name, scope.read().items())

    def __iter__(self) -> Iterator[Scope]:
        """Yield the scopes that there are now."""
        for name, frame in function_frames():
            yield Scope(name, partial(local_variables, frame), partial(set_local_variables, frame))
        yield from self._found

    def name_of(self, obj: object) -> str | None:
        """Return the name of an object whose content is a scope. Raises `OpaqueError` for one that is kept otherwise."""
        if id(obj) in self._excluded:
            raise OpaqueError
        return self._objects.name_of(obj)

    def is_scope(self, obj: object) -> bool:
        """Return whether the content of an object is a scope of its own."""
        return self._objects.name_of(obj) is not None

    def named(self, name: str) -> Any:
        """Return the object of that name. Raises `KeyError`."""
        found = self._objects.named(name)
        if found is None:
            raise KeyError(name)
        return found

    def _add(self, scope: Scope) -> None:
        if len(self._found) < _MOST_SCOPES:
            self._found.append(scope)

    def _search(self, where: str, variables: Iterable[tuple[str, Any]]) -> None:
        for key, value in list(variables):
            self._look(f"{where}.{key}", value)

    def _look(self, name: str, value: Any) -> None:
        kind = type(value)
        if self.is_scope(value) or id(value) in self._excluded:
            return
        if kind in (FunctionType, MethodType):
            self._look_into(name, value)
        elif kind is dict and len(value) <= _MOST_KEYS and not self._is_plain(value):
            self._objects.add(name, value)
            self._add(Scope(name, partial(_with_names, value), value.update, value.pop))
        elif kind in (list, tuple) and len(value) <= _MOST_KEYS:
            for index, part in enumerate(value):
                if is_own(type(part), self.modules):
                    self._look(f"{name}[{index}]", part)
        elif isinstance(value, type) and value.__module__ in self.modules:
            self._objects.add(name, value)
            self._add(Scope(name, _Variables(vars(value)), partial(_set_of_class, value)))
        elif is_own(kind, self.modules):
            self._objects.add(name, value)
            read, write = partial(attributes_of, value), partial(set_attributes, value)
            self._add(Scope(name, read, write, partial(object.__delattr__, value)))

    def _is_plain(self, value: dict[str, Any]) -> bool:
        try:
            ValueWriter(None, self.name_of, self.modules).write(value)
        except OpaqueError:
            return False
        return True

    def _look_into(self, name: str, function: Any) -> None:
        """Find what a function of the script's shares with the one around it, and the object of a method."""
        if isinstance(function, MethodType):
            self._look(f"{name}.__self__", function.__self__)
            function = function.__func__
        if not isinstance(function, FunctionType) or id(function) in self._functions:
            return
        self._functions.add(id(function))
        if function.__closure__ and function.__module__ in self.modules:
            cells = dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))
            self._add(Scope(f"{name}()", partial(closed_over, cells), partial(_fill, cells)))


class _Variables:
    """Reads variables. Functions and classes next to them are sorted out once, not in each step."""

    def __init__(self, found: Mapping[str, Any], ignored: Collection[str] = ()) -> None:
        self._found = found
        self._ignored = ignored
        self._size = -1
        self._names: list[str] = []

    def __call__(self) -> dict[str, Any]:
        found = self._found
        if len(found) != self._size:
            names = [name for name, value in list(found.items()) if _is_variable(name, value)]
            self._names = [name for name in names if name not in self._ignored]
            self._size = len(found)
        return {name: found[name] for name in self._names if name in found}


def _is_variable(name: str, value: Any) -> bool:
    return not name.startswith("__") and not isinstance(value, (FunctionType, BuiltinFunctionType, ModuleType, type))


def _with_names(content: Mapping[Any, Any]) -> dict[str, Any]:
    return {key: value for key, value in list(content.items()) if type(key) is str}


def _set_of_class(kind: type, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setattr(kind, name, value)


def _fill(cells: Mapping[str, CellType], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        cells[name].cell_contents = value
