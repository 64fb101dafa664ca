"""Scopes of the script's variables: its functions, modules, objects and dicts."""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace
from enum import EnumType
from functools import partial
from itertools import islice
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from deadpool_run.worker.codec import table_of
from deadpool_run.worker.compat.loaders import all_workers, set_all_workers
from deadpool_run.worker.process.frames import (
    closed_over,
    function_frames,
    local_variables,
    module_frames,
    script_frames,
    set_closed_over,
    set_local_variables,
)
from deadpool_run.worker.process.liveness import dead_in_modules, dead_variables
from deadpool_run.worker.process.script_files import is_unlisted, own_modules
from deadpool_run.worker.state.optimizers import is_optimizer_wrapper
from deadpool_run.worker.state.script_hooks import module_of
from deadpool_run.worker.variables.assigned import AssignedAttributes
from deadpool_run.worker.variables.children import CONTAINERS, Children, ModulesInside
from deadpool_run.worker.variables.classes import Classes, forward_of, set_of_class
from deadpool_run.worker.variables.containers import (
    PLAIN,
    DictVariables,
    has_only_names,
    is_small,
    parts_in,
    set_in_context,
    value_in_context,
)
from deadpool_run.worker.variables.data_sets import DRAWN_AGAIN, is_data, parts_of
from deadpool_run.worker.variables.library_objects import has_only_values
from deadpool_run.worker.variables.modules import (
    AttributeTable,
    attributed_buffers_of,
    buffers_to_keep,
    functions_of,
    hooks_of,
    ignored_in,
    is_wrapper,
    small_attributes_of,
    submodules_of,
)
from deadpool_run.worker.variables.scope import FoundScopes, Read, Remove, Scope, ScopeMark, Write, of_table
from deadpool_run.worker.variables.unchanged import is_fixed
from deadpool_run.worker.variables.values.kinds.distributed_tensors import mesh_of
from deadpool_run.worker.variables.values.kinds.functions import (
    Attributes,
    arguments_of,
    defaults_of,
    functions_in,
    has_changing_defaults,
    is_bound_in_c,
    name_of_variables,
    set_arguments,
    set_defaults,
)
from deadpool_run.worker.variables.values.kinds.own_objects import (
    container_of,
    content_of,
    has_only_table,
    is_own,
    set_attributes,
)
from deadpool_run.worker.variables.values.objects import Objects, OpaqueError
from deadpool_run.worker.variables.values.writer import ValueWriter

_MOST_CONTAINERS = 4096


class Scopes:
    """All scopes, found once. Objects that the script creates later are parts of values."""

    def __init__(self, protected: Iterable[object], parts: Iterable[tuple[str, Any]]) -> None:
        """`protected` are objects that are kept by other means, and `parts` the modules and parameters in them, by name."""
        self._assigned = AssignedAttributes()
        sources = {name: vars(module) for name, module, _ in own_modules()}
        for frame in script_frames():
            sources.setdefault(str(frame.f_globals.get("__name__", "")), frame.f_globals)
            self._assigned.note(frame.f_code, frame.f_globals)
        self.modules = frozenset(sources)
        self._found = FoundScopes()
        self.children = Children()
        self.objects = Objects()
        """Objects whose content is a scope, or is kept by other means."""
        objects, inside = [(f"protected {number}", each) for number, each in enumerate(protected)], list(parts)
        for name, each in (*objects, *inside):
            self.objects.add(name, each)
            if (mesh := mesh_of(each)) is not None:
                self.objects.add_mesh(f"{name}, mesh", mesh)
            if isinstance(each, Optimizer) and not is_optimizer_wrapper(each):
                self.objects.add(f"{name}, state", each.state)
                self.objects.add(f"{name}, groups", each.param_groups)
        self.parameters: list[tuple[str, Tensor]] = []
        """The parameters of unprotected modules, by name."""
        self._begun = False
        self._functions: set[int] = set()
        self._containers: set[int] = set()
        self._classes = Classes()
        self._loaders: WeakSet[DataLoader[Any]] = WeakSet()
        self._attributes = Attributes()
        self._found.add(Scope("functions", self._attributes.read, self._attributes.write, self._attributes.remove))
        self._found.add(Scope("persistent workers of loaders", all_workers, set_all_workers))
        known = {id(each) for _, each in inside}
        around = [(name, each) for name, each in objects if id(each) not in known]
        for name, each in (*around, *inside):
            self._add_attached(name, each)
            if isinstance(each, nn.Module) and not is_wrapper(each):
                self.children.add(name, each)
        for frame_name, frame in function_frames(script_frames()):
            self._search(frame_name, local_variables(frame).items())
        for name, variables in sources.items():
            self._add_variables(name, variables)
        self._search_inside(0)
        self._begun = True

    def add_module(self, name: str, module: ModuleType) -> ScopeMark:
        """Add a module that the script has imported since; return a mark before its scopes."""
        mark = self._found.mark()
        self.modules |= {name}
        self._add_variables(name, vars(module))
        self._search_inside(mark.changing)
        return mark

    def since(self, mark: ScopeMark) -> list[Scope]:
        """Return the scopes after a mark."""
        return self._found.since(mark)

    def remove_modules(self, names: Collection[str], mark: ScopeMark) -> None:
        """Forget modules that the script will import again: all that it has imported since the mark."""
        self.modules -= set(names)
        self._found.cut(mark)

    def __iter__(self) -> Iterator[Scope]:
        """Yield the present scopes."""
        yield from self._running(script_frames())
        yield from self._found.changing
        yield from self._found.fixed

    def changing(self) -> Iterator[Scope]:
        """Yield the scopes that may have changed since the loop began."""
        frames = list(script_frames())
        yield from self._running(frames)
        dead = dead_in_modules(module_frames(frames))
        for scope in self._found.changing:
            names = None if scope.table is None else dead.get(scope.table.identity)
            yield replace(scope, dead=names) if names else scope
        yield from self._found.fixed.changed()

    def of_names(self, names: Collection[str]) -> Iterator[Scope]:
        """Yield the present scopes with these names. Cheap for few names."""
        if names:
            yield from (scope for scope in self._running(script_frames()) if scope.name in names)
            yield from (scope for scope in map(self._found.by_name.get, names) if scope is not None)

    def _running(self, frames: Iterable[FrameType]) -> Iterator[Scope]:
        for name, frame in function_frames(frames):
            read, write = partial(local_variables, frame), partial(set_local_variables, frame)
            yield Scope(name, read, write, dead=dead_variables(frame))

    def is_scope(self, obj: object) -> bool:
        """Return whether the content of an object is a scope, or is kept by other means."""
        return self.objects.name_of(obj) is not None

    def _add_variables(self, name: str, variables: dict[str, Any]) -> None:
        """Add the variables of a module, and what they contain."""
        self._search(name, variables.items())
        self._found.add(of_table(name, AttributeTable(variables), variables.update))

    def _search_inside(self, start: int) -> None:
        """Search the scopes from this number on. The list grows: a scope may contain further ones."""
        while start < len(self._found.changing):
            for scope in islice(self._found.changing, start, None):
                self._search(scope.name, scope.read().items())
            start = len(self._found.changing)
            for name, kind in self._classes.take(self.is_scope):
                self._add_class(name, kind)
            for scope in self._assigned.take(self.modules):
                self._found.add(scope)

    def _search(self, where: str, variables: Iterable[tuple[str, Any]]) -> None:
        for key, value in list(variables):
            if key != "__builtins__":
                self._look(f"{where}.{key}", value)

    def _look(self, name: str, value: Any) -> None:
        kind = type(value)
        self._classes.note(kind, self.modules)
        if self.is_scope(value) or name_of_variables(value) is not None:
            return
        if kind in (FunctionType, MethodType, partial):
            self._look_into(name, value)
        elif is_bound_in_c(value):
            self._look(f"{name}.__self__", value.__self__)
        elif isinstance(value, ContextVar | threading.local):
            self._add_context(name, value)
        elif is_small(value) and (kind in (list, tuple) or not self._is_plain(value)):
            self._look_at_container(name, kind, value)
        elif isinstance(value, nn.Module):
            self._add_module(name, value)
        elif kind is ModuleType and is_unlisted(value):
            self.objects.add(name, value)
            self.modules |= {value.__name__}
            self._add_variables(value.__name__, vars(value))
        else:
            self._look_at_own(name, kind, value)

    def _look_at_container(self, name: str, kind: type, value: Any) -> None:
        base = dict if kind is dict else container_of(kind, self.modules, libraries=True)
        if base is not None and issubclass(base, dict) and has_only_names(value):
            self._add_own_dict(name, value, base)
        else:
            self._look_at_parts(name, value)
            if kind not in PLAIN:
                self._look_at_own(name, kind, value)

    def _look_at_parts(self, name: str, value: Any) -> None:
        """Look at the modules, objects, loaders and data sets in a container that is one value, and in those inside it."""
        if id(value) in self._containers or len(self._containers) >= _MOST_CONTAINERS:
            return
        self._containers.add(id(value))
        for where, part in parts_in(value):
            if isinstance(part, nn.Module) or is_data(part) or self._has_attributes(part):
                self._look(f"{name}{where}", part)
            elif is_small(part) and not self._is_plain(part):
                self._look_at_parts(f"{name}{where}", part)

    def _add_data(self, name: str, value: Any) -> None:
        """Add the parts of a loader, or the attributes of a data set or a sampler. A loader, which may have workers, is not kept alive."""
        if not isinstance(value, DataLoader):
            self._add_searched(name, value, DRAWN_AGAIN)
        elif value not in self._loaders:
            self._loaders.add(value)
            self._search(name, parts_of(value))

    def _add_searched(self, name: str, value: Any, ignored: Collection[str] = ()) -> None:
        self.objects.add(name, value)
        self._add_attributes(name, value, ignored)
        self._search(name, vars(value).items())

    def _look_at_own(self, name: str, kind: type, value: Any) -> None:
        """Add a class of the script's, or an object of one."""
        if isinstance(value, type) and value.__module__ in self.modules:
            self._add_class(name, value)
        elif is_own(kind, self.modules):
            self._add_object(name, value)
        elif is_data(value):
            self._add_data(name, value)
        elif self._has_attributes(value):
            self._add_searched(name, value)

    def _add_object(self, name: str, value: Any) -> None:
        self.objects.add(name, value)
        read, write = partial(content_of, value), partial(set_attributes, value)
        scope, table = Scope(name, read, write, partial(object.__delattr__, value)), table_of(value)
        if not has_only_table(type(value)):
            self._found.add(scope)
        elif self._add_table(scope, table, table, value):
            self._search(scope.name, table.items())

    def _has_attributes(self, value: Any) -> bool:
        is_simple = is_own(type(value), self.modules) or is_optimizer_wrapper(value)
        return is_simple or has_only_values(value, self.is_scope)  # last, because it searches

    def _is_plain(self, value: Any) -> bool:
        try:
            ValueWriter(None, self.objects, self.modules).write(value)
        except OpaqueError:
            return False
        return True

    def _add_context(self, name: str, value: ContextVar[Any] | threading.local) -> None:
        """Add the value of a context variable, or the attributes of a thread-local object, for the main thread, which is this one."""
        if isinstance(value, ContextVar):
            self._add_named(name, value, partial(value_in_context, value), partial(set_in_context, value))
        else:
            self._add_dict(name, value, vars(value))

    def _add_class(self, name: str, kind: type) -> None:
        self._classes.note(kind, self.modules)
        self.objects.add(name, kind)
        table = AttributeTable(vars(kind))
        self._add_table(of_table(name, table, partial(set_of_class, kind)), vars(kind), table.all())
        members: dict[str, Any] = dict(kind.__members__) if isinstance(kind, EnumType) else {}
        for key, member in members.items():
            self._add_attributes(f"{name}.{key}", member)
        for key, each in list(vars(kind).items()):
            if isinstance(each, type):
                self._look(f"{name}.{key}", each)
            for part, function in functions_in(each):
                self._look_into(f"{name}.{key}{part}", function)

    def _add_attached(self, name: str, owner: Any) -> None:
        """Add the attributes, and the hooks with a state, that a script has attached to a protected object or to a module."""
        self._classes.note(type(owner), self.modules)
        if isinstance(owner, nn.Module) and not is_wrapper(owner):
            self._add_forward(type(owner))
        if isinstance(owner, nn.Module | Optimizer | Tensor):
            self._add_attributes(name, owner, () if is_optimizer_wrapper(owner) else ignored_in(owner))
            for key, hook in hooks_of(owner):
                self._look(f"{name}.{key}", hook)
            for key, buffer in attributed_buffers_of(owner):
                self._add_attributes(f"{name}.{key}", buffer, ignored_in(buffer))
            return
        if is_own(type(owner), self.modules):
            self._found.add(
                Scope(f"{name}, attributes", partial(small_attributes_of, owner), partial(set_attributes, owner))
            )
        self._look_at_functions([(name, functions_of(owner))])

    def _look_at_functions(self, found: Iterable[tuple[str, Iterable[tuple[str, Any]]]]) -> None:
        """Look into the script's functions among these, by owner."""
        for name, functions in found:
            for key, function in functions:
                if module_of(function) in self.modules:
                    self._look(f"{name}.{key}", function)

    def _add_forward(self, kind: type[nn.Module]) -> None:
        """Add the method that runs a class of modules: a script may replace it, also in a class of torch's."""
        if (owner := self._classes.owner_of_forward(kind, self.modules)) is not None:
            read = partial(forward_of, owner)
            scope = Scope(f"{owner.__module__}.{owner.__qualname__}", read, partial(set_of_class, owner))
            self._found.add_fixed(scope, vars(owner), read())

    def _add_attributes(self, name: str, owner: Any, ignored: Collection[str] = ()) -> None:
        table = AttributeTable(vars(owner), ignored)
        self._add_table(of_table(name, table, vars(owner).update, vars(owner).pop), vars(owner), table.all())

    def _add_table(self, scope: Scope, table: Mapping[str, Any], values: Mapping[str, Any], holder: Any = None) -> bool:
        """Add the scope of these variables in a table, and the object that may exchange it; return whether all are fixed."""
        fixed = all(is_fixed(value, self.modules, self.is_scope) for value in values.values())
        if self._begun or not fixed:  # of what is found later, other processes may have found other values
            self._found.add(scope)
            return False
        self._found.add_fixed(scope, table, values, holder)
        return True

    def _add_module(self, name: str, module: nn.Module) -> None:
        """Add an unprotected module and its submodules."""
        for path, each in submodules_of(module):
            if self.is_scope(each):
                continue
            self.objects.add(f"{name}{path}", each)
            self._add_attached(f"{name}{path}", each)
            self.parameters += [(f"{name}{path}.{key}", value) for key, value in each.named_parameters(recurse=False)]
            if buffers := buffers_to_keep(each):
                self._found.add(Scope(f"{name}{path}, buffers", partial(dict, buffers), buffers.update, buffers.pop))
            if isinstance(each, CONTAINERS):
                children = ModulesInside(each)
                self._found.add(Scope(f"{name}{path}, modules", children.read, children.write, children.remove))

    def _add_own_dict(self, name: str, value: Any, base: Any) -> None:
        self._add_dict(name, value, value, base)
        if (table := table_of(value)) and table is not value:
            self._found.add(Scope(f"{name}, attributes", DictVariables(table).read, table.update))

    def _add_dict(self, name: str, value: Any, content: dict[str, Any], base: Any = dict) -> None:
        """Add an object whose variables are in a dict. The methods of `base` read and set it, not those of the script's class."""
        variables = DictVariables(content, base)
        self._add_named(name, value, variables.read, variables.write, variables.remove)

    def _add_named(self, name: str, value: Any, read: Read, write: Write, remove: Remove = None) -> None:
        self.objects.add(name, value)
        self._found.add(Scope(name, read, write, remove))

    def _look_into(self, name: str, function: Any) -> None:
        """Add the attributes, defaults and closure of a function of the script's, and the object of a method."""
        if isinstance(function, partial):
            self._add_named(name, function, partial(arguments_of, function), partial(set_arguments, function))
            self._look(f"{name}.func", function.func)
            return
        if isinstance(function, MethodType):
            self._look(f"{name}.__self__", function.__self__)
            function = function.__func__
        is_own_function = isinstance(function, FunctionType) and function.__module__ in self.modules
        if not is_own_function or id(function) in self._functions:
            return
        self._functions.add(id(function))
        self._attributes.add(name, function)
        self._assigned.note(function.__code__, function.__globals__)
        if has_changing_defaults(function):
            self._found.add(Scope(f"{name}, defaults", partial(defaults_of, function), partial(set_defaults, function)))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        cells.pop("__class__", None)  # of a method that calls super()
        if cells:
            self._found.add(Scope(f"{name}, closure", partial(closed_over, cells), partial(set_closed_over, cells)))
