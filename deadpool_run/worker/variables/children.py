"""Modules that a script puts in the place of others while it trains: another activation, a loss with other weights.

A snapshot holds no module. So a process that has the new one gets it back, and a replacement gets a stand-in that refuses to be
called. Modules with parameters or buffers are refused earlier, by `worker.state`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import nn

from deadpool_run.worker.compat.modules import children_of
from deadpool_run.worker.state.numbered import NumberedObjects
from deadpool_run.worker.variables.modules import FixedTables
from deadpool_run.worker.variables.values.lost import refuse_lost

_Table = dict[str, nn.Module | None]
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_NONE, _REMOVED = 0, -1
_MOST_KEPT = 16
"""The new modules that can be put back: more than the snapshots that a rank has."""


class Children:
    """The modules inside others, as they were when the loop began and as they are now."""

    def __init__(self) -> None:
        self._modules: dict[str, tuple[nn.Module, _Table, _Table]] = {}
        """By name: the module, its table of modules, and a copy of that, both of when the loop began."""
        self._tables: FixedTables[str] = FixedTables()
        self._new: NumberedObjects[nn.Module] = NumberedObjects(_MOST_KEPT)

    def add(self, name: str, module: nn.Module) -> None:
        """Note the modules directly inside this one."""
        if table := children_of(module):
            self._modules[name] = module, table, dict(table)
            self._tables.add(name, table, table)

    def take(self) -> dict[str, int]:
        """Return a number for each place that has another module now; equal numbers are the same module of the same process."""
        return {
            f"{name}.{key}": self._number(table[key]) if key in table else _REMOVED
            for name, table, first in self._changed()
            for key, child in first.items()
            if key not in table or table[key] is not child
        }

    def put(self, taken: Mapping[str, int], refuse: Callable[[str], NoReturn]) -> None:
        """Put the modules in the places that they had when `take` returned this."""
        for _, table, first in self._changed():
            added = {key: child for key, child in table.items() if key not in first}
            table.clear()  # the order of a sequence's modules is that of its table
            table.update(first | added)
        for path, number in taken.items():
            name, _, key = path.rpartition(".")  # which no key has
            if name not in self._modules:
                continue
            table = children_of(self._modules[name][0])
            if number == _REMOVED:
                del table[key]
            else:
                known = self._new.get(number)
                table[key] = None if number == _NONE else LostModule(path, refuse) if known is None else known

    def _changed(self) -> Iterator[tuple[str, _Table, _Table]]:
        """Yield modules in which others may have changed: their names and tables, now and of when the loop began."""
        # A deletion from a sequence gives it another table.
        with_another = (name for name, (module, table, _) in self._modules.items() if children_of(module) is not table)
        for name in dict.fromkeys((*self._tables.changed(), *with_another)):
            module, _, first = self._modules[name]
            yield name, children_of(module), first

    def _number(self, module: nn.Module | None) -> int:
        return _NONE if module is None else self._new.number(module)


class ModulesInside:
    """The modules in a container that is not protected, by name: a script appends to it, or drops the first."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def read(self) -> _Table:
        """Return the present ones."""
        return dict(children_of(self._module))

    def write(self, modules: Mapping[str, Any]) -> None:
        """Set some. Those of a sequence keep the order of their numbers. One that was lost is refused: it would be iterated over."""
        refuse_lost(modules.values())
        table = children_of(self._module)
        table.update(modules)
        if all(map(str.isdecimal, table)) and (ordered := sorted(table, key=int)) != list(table):
            found = {key: table[key] for key in ordered}
            table.clear()
            table.update(found)

    def remove(self, name: str) -> None:
        """Take one out."""
        children_of(self._module).pop(name)


def shown(path: str) -> str:
    """Return a path as a user knows it."""
    return path.removeprefix("protected ")


class LostModule(nn.Module):
    """A stand-in for a module that this process never had. Calling it is refused."""

    def __init__(self, path: str, refuse: Callable[[str], NoReturn]) -> None:
        super().__init__()
        self._lost_as = path, refuse

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse."""
        path, refuse = self._lost_as
        refuse(
            f"the module {shown(path)} was put in place of another while the script trained, and no snapshot holds modules: a replacement "
            "for a lost rank does not have it.\nCreate every module in set-up, and choose between them by a variable or an attribute."
        )
