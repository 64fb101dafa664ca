"""Attributes that the script's code assigns to modules and classes of libraries, as in `math.scale = 2`. They are variables, too.

A worker does not look at what libraries have. But the script's code names what it assigns.
"""

import dis
import sys
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from types import CodeType, ModuleType
from typing import Any

from deadpool_run.ids import is_of_package
from deadpool_run.worker.process.liveness import names_of
from deadpool_run.worker.variables.classes import set_of_class
from deadpool_run.worker.variables.modules import AttributeTable, stores_among
from deadpool_run.worker.variables.scope import Scope, of_table

_STORE, _IMPORT, _CACHE = (dis.opmap[name] for name in ("STORE_ATTR", "IMPORT_NAME", "CACHE"))
_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_BEFORE = frozenset(dis.opmap[name] for name in (*_GLOBAL, "LOAD_ATTR", "SWAP"))
"""Instructions before an assignment to an attribute, if the object is not a local variable: += swaps, for example."""
_OF_IMPORTS = frozenset({"IMPORT_FROM", "SWAP", "POP_TOP"})
_LEFT_OUT = frozenset({"EXTENDED_ARG", "PUSH_NULL", "CACHE"})
_STREAMS = frozenset({"stdin", "stdout", "stderr"})
"""A process has its own."""


class AssignedAttributes:
    """The attributes that the script's functions assign to objects that are not the script's."""

    def __init__(self) -> None:
        self._codes: dict[int, CodeType] = {}
        self._new: dict[int, tuple[Any, set[str]]] = {}
        """By identity: a module or a class, and the names of attributes that were noted and not taken."""
        self._noted: set[tuple[int, str]] = set()

    def note(self, code: CodeType, variables: Mapping[str, Any]) -> None:
        """Note what a function assigns, and those inside it. `variables` are its global ones."""
        if id(code) in self._codes:
            return
        self._codes[id(code)] = code
        for owner, name in _assigned(code, variables):
            if (id(owner), name) not in self._noted and not (owner is sys and name in _STREAMS):
                self._noted.add((id(owner), name))
                self._new.setdefault(id(owner), (owner, set()))[1].add(name)
        for each in code.co_consts:
            if isinstance(each, CodeType):
                self.note(each, variables)

    def take(self, own: Collection[str]) -> Iterator[Scope]:
        """Yield scopes of the attributes that were noted, and forget these. `own` are the script's modules, which have scopes."""
        found, self._new = self._new, {}
        for owner, names in found.values():
            is_module = isinstance(owner, ModuleType)
            module = owner.__name__ if is_module else owner.__module__
            if module not in own and not is_of_package(module):
                where = module if is_module else f"{module}.{owner.__qualname__}"
                table = AttributeTable(_Part(vars(owner), names))
                yield of_table(where, table, partial(set_of_class, owner), partial(delattr, owner))


class _Part(Mapping[str, Any]):
    """Those attributes in a table that have one of some names."""

    def __init__(self, table: Mapping[str, Any], names: set[str]) -> None:
        self._table, self._names = table, sorted(names)

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self._table)

    def __len__(self) -> int:
        return sum(name in self._table for name in self._names)


def _assigned(code: CodeType, variables: Mapping[str, Any]) -> Iterator[tuple[Any, str]]:
    """Yield the modules and classes to which a function assigns attributes, each with the name of an attribute."""
    if not _may_assign(code):
        return
    steps = [each for each in dis.get_instructions(code) if each.opname not in _LEFT_OUT]
    for at, step in enumerate(steps):
        place, name = None, step.argval
        if step.opcode == _STORE:
            place = _place_before(steps, at, variables)
        elif step.opname in _GLOBAL and name == "setattr":
            place, name = _arguments_of_setattr(steps, at, variables)
        if isinstance(place, ModuleType | type):
            yield place, name


def _may_assign(code: CodeType) -> bool:
    """Return whether a function may assign an attribute of an object that is not in a local variable. Cheap."""
    if "setattr" in code.co_names:
        return True
    operations = code.co_code[::2]
    has_import = _IMPORT in operations
    for at in stores_among(operations):
        before = at - 1
        while operations[before] == _CACHE:
            before -= 1
        if has_import or operations[before] in _BEFORE:
            return True
    return False


def _place_before(steps: list[dis.Instruction], at: int, variables: Mapping[str, Any]) -> Any:
    """Return the module or class that the instructions before this one have named; None for anything else."""
    if steps[at - 1].opname == "SWAP":
        copied = (each for each in range(at) if steps[each].opname == "COPY")
        of_same = [each for each in copied if steps[each + 1].argval == steps[at].argval]
        return _place_before(steps, of_same[-1], variables) if of_same else None
    path, at = [], at - 1
    while at > 0 and steps[at].opname == "LOAD_ATTR":
        path.append(steps[at].argval)
        at -= 1
    return _inside(_named(steps, at, variables), reversed(path))


def _arguments_of_setattr(steps: list[dis.Instruction], at: int, variables: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the module or class and the name in a call of `setattr`; None if it is another object, or if the name is computed."""
    end = at + 2
    while end < len(steps) and steps[end].opname == "LOAD_ATTR":
        end += 1
    if end >= len(steps) or steps[end].opname != "LOAD_CONST" or type(steps[end].argval) is not str:
        return None, ""
    return _place_before(steps, end, variables), steps[end].argval


def _named(steps: list[dis.Instruction], at: int, variables: Mapping[str, Any]) -> Any:
    """Return the value of a global variable, or what a function has imported itself."""
    if steps[at].opname in _GLOBAL:
        return variables.get(steps[at].argval)
    *_, name = names_of(steps[at])
    stored = [place for place, each in enumerate(steps) if each.opname.startswith("STORE_") and name in names_of(each)]
    return _imported(steps, stored[0]) if steps[at].opname.startswith("LOAD_") and len(stored) == 1 else None


def _imported(steps: list[dis.Instruction], at: int) -> Any:
    """Return what the import right before this instruction has found; None if there is no import."""
    begin = at - 1
    while begin > 0 and steps[begin].opname in _OF_IMPORTS:
        begin -= 1
    if steps[begin].opname != "IMPORT_NAME":
        return None
    module, parts = steps[begin].argval, [step.argval for step in steps[begin:at] if step.opname == "IMPORT_FROM"]
    if not parts and module.partition(".")[0] in names_of(steps[at]):  # import a.b
        return sys.modules.get(module.partition(".")[0])
    found = sys.modules.get(module)
    is_from = parts and not module.endswith(f".{parts[-1]}")  # else it is import a.b as c
    return vars(found).get(parts[-1]) if is_from and found is not None else found


def _inside(found: Any, path: Iterator[str]) -> Any:
    for part in path:
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found
