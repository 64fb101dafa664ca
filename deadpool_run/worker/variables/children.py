"""Modules that a script puts in the place of others while it trains: another activation, a loss with other weights.

A snapshot holds no module. So a process that has the new one gets it back, and a replacement gets a stand-in that refuses to be
called. Modules with parameters or buffers are refused earlier, by `worker.state`.
"""

import secrets
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn

from deadpool_run.worker.compat.modules import children_of
from deadpool_run.worker.variables.modules import FixedTables

_Table = dict[str, nn.Module | None]
_NONE = 0
_MOST_KEPT = 16
"""The new modules that can be put back: more than the snapshots that a rank has."""


class Children:
    """The modules inside others, as they were when the loop began and as they are now."""

    def __init__(self) -> None:
        self._tables: FixedTables[tuple[str, _Table, _Table]] = FixedTables()
        """Each with its name, and a copy of when the loop began."""
        self._places: dict[str, tuple[_Table, str]] = {}
        self._new: deque[tuple[int, nn.Module]] = deque(maxlen=_MOST_KEPT)

    def add(self, name: str, module: nn.Module) -> None:
        """Note the modules directly inside this one."""
        if table := children_of(module):
            self._tables.add((name, table, dict(table)), table, table)
            self._places |= {f"{name}.{key}": (table, key) for key in table}

    def take(self) -> dict[str, int]:
        """Return a number for each place that has another module now; equal numbers are the same module of the same process."""
        return {
            f"{name}.{key}": self._number(table.get(key))
            for name, table, first in self._tables.changed()
            for key, child in first.items()
            if table.get(key) is not child
        }

    def put(self, taken: Mapping[str, int], refuse: Callable[[str], NoReturn]) -> None:
        """Put the modules in the places that they had when `take` returned this."""
        known = dict(self._new)
        for _, table, first in self._tables.changed():
            table.update(first)
        for path, number in taken.items():
            if path in self._places:
                table, key = self._places[path]
                table[key] = None if number == _NONE else known[number] if number in known else LostModule(path, refuse)

    def _number(self, module: nn.Module | None) -> int:
        if module is None:
            return _NONE
        for number, known in self._new:
            if known is module:
                return number
        self._new.append((secrets.randbits(62) | 1, module))
        return self._new[-1][0]


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
