"""Scope: a named group of variables of the script."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import getweakrefcount

from deadpool_run.worker.variables.modules import AttributeTable

Read = Callable[[], Mapping[str, Any]]
Write = Callable[[Mapping[str, Any]], Any]
Remove = Callable[[str], object] | None


@dataclass(frozen=True, slots=True)
class Scope:
    """A named group of variables of the script."""

    name: str
    read: Read
    """Returns the present values by variable."""
    write: Write
    """Sets some variables."""
    remove: Remove = None
    """Deletes a variable that did not exist at a snapshot; None where that makes no difference."""
    table: AttributeTable | None = None
    """Reads them, if unchanged functions and classes are left out."""
    dead: frozenset[str] = frozenset()
    """Variables that running code assigns again before it reads them."""

    def all(self) -> Mapping[str, Any]:
        """Return the present values, also those that `read` leaves out."""
        return self.read() if self.table is None else self.table.all()

    def without_dead(self) -> tuple[Mapping[str, Any], Collection[str]]:
        """Return the present values without those of dead variables, and the names of these. A weak reference may still see one."""
        found = self.read()
        dead = {name for name in self.dead if name in found and not getweakrefcount(found[name])}
        return {name: value for name, value in found.items() if name not in dead} if dead else found, dead

    def left_out(self) -> Mapping[str, Any]:
        """Return what `read` leaves out as long as it does not change."""
        return {} if self.table is None else self.table.code


def of_table(name: str, table: AttributeTable, write: Write, remove: Remove = None) -> Scope:
    """Return the scope of the attributes of a module, a class or an object."""
    return Scope(name, table, write, remove, table)
