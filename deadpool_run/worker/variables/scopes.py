"""Where the script has variables: in functions, modules, objects and dicts of its own."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

from deadpool_run.worker.process.script_files import own_modules
from deadpool_run.worker.variables.frames import is_function, local_variables, script_frames, set_local_variables
from deadpool_run.worker.variables.own_objects import attributes_of, has_slots, is_own, set_attributes
from deadpool_run.worker.variables.values import OpaqueError, ValueWriter

_MOST_KEYS = 256
"""A dict or a list with more is one value, not a scope."""
_MOST_SCOPES = 4096
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes of every module: its tables of parameters, buffers, children and hooks, and its mode."""


class Scope:
    """Variables by name: `read` returns their present values, `write` sets some."""

    def __init__(
        self,
        name: str,
        read: Callable[[], Mapping[str, Any]],
        write: Callable[[Mapping[str, Any]], None],
        remove: Callable[[str], object] | None = None,
    ) -> None:
        """`remove` ends a variable that had no value at a snapshot; None where that makes no difference."""
        self.name = name
        self.read = read
        self.write = write
        self.remove = remove


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
        self._objects: dict[int, tuple[str, Any]] = {}
        self._by_name: dict[str, Any] = {}
        self._functions: set[int] = set()
        for frame_name, frame in frames():
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
        for name, frame in frames():
            yield Scope(name, partial(local_variables, frame), partial(set_local_variables, frame))
        yield from self._found

    def name_of(self, obj: object) -> str | None:
        """Return the name of an object whose content is a scope. Raises `OpaqueError` for one that is kept otherwise."""
        if id(obj) in self._excluded:
            raise OpaqueError
        found = self._objects.get(id(obj))
        return found[0] if found is not None and found[1] is obj else None

    def is_scope(self, obj: object) -> bool:
        """Return whether the content of an object is a scope of its own."""
        return id(obj) in self._objects

    def named(self, name: str) -> Any:
        """Return the object of that name. Raises `KeyError`."""
        return self._by_name[name]

    def _add(self, scope: Scope) -> None:
        if len(self._found) < _MOST_SCOPES:
            self._found.append(scope)

    def _search(self, where: str, variables: Iterable[tuple[str, Any]]) -> None:
        for key, value in list(variables):
            self._look(f"{where}.{key}", value)

    def _look(self, name: str, value: Any) -> None:
        kind = type(value)
        if id(value) in self._objects or id(value) in self._excluded:
            return
        if kind in (FunctionType, MethodType):
            self._look_into(name, value)
        elif kind is dict and len(value) <= _MOST_KEYS and not self._is_plain(value):
            self._add_object(name, value, value)
        elif kind in (list, tuple) and len(value) <= _MOST_KEYS:
            for index, part in enumerate(value):
                if is_own(type(part), self.modules):
                    self._look(f"{name}[{index}]", part)
        elif isinstance(value, type) and value.__module__ in self.modules:
            self._add_named(name, value)
            self._add(Scope(name, _Variables(vars(value)), partial(_set_of_class, value)))
        elif is_own(kind, self.modules):
            self._add_own(name, value)

    def _is_plain(self, value: dict[str, Any]) -> bool:
        try:
            ValueWriter(None, self.name_of, self.modules).write(value)
        except OpaqueError:
            return False
        return True

    def _add_own(self, name: str, value: Any) -> None:
        if has_slots(type(value)):
            self._add_named(name, value)
            self._add(
                Scope(
                    name,
                    partial(attributes_of, value),
                    partial(set_attributes, value),
                    partial(object.__delattr__, value),
                )
            )
        elif type(vars(value)) is dict:
            self._add_object(name, value, vars(value))

    def _add_object(self, name: str, value: Any, content: dict[str, Any]) -> None:
        self._add_named(name, value)
        self._add(Scope(name, partial(_with_names, content), content.update, content.pop))

    def _add_named(self, name: str, value: Any) -> None:
        self._objects[id(value)] = (name, value)
        self._by_name[name] = value

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
            self._add(Scope(f"{name}()", partial(_contents, cells), partial(_fill, cells)))


def frames() -> Iterator[tuple[str, FrameType]]:
    """Yield the functions of the script that are running, innermost first, each under a name of its own."""
    seen: dict[str, int] = {}
    for frame in script_frames():
        if is_function(frame):
            name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
            seen[name] = seen.get(name, 0) + 1
            yield f"{name}()" + (f" {seen[name]}" if seen[name] > 1 else ""), frame


class _Variables:
    """Reads variables, and does not look at all functions and classes beside them in each step."""

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


def _contents(cells: Mapping[str, CellType]) -> dict[str, Any]:
    found = {}
    for name, cell in cells.items():
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not bound yet
            continue
    return found


def _fill(cells: Mapping[str, CellType], values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        cells[name].cell_contents = value
