"""Named groups of variables of the script."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import getweakrefcount

from deadpool_run.worker.variables.modules import AttributeTable, FixedTables

Read = Callable[[], Mapping[str, Any]]
Write = Callable[[Mapping[str, Any]], Any]
Remove = Callable[[str], object] | None
_MOST_SCOPES = 4096


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
        if not self.dead:
            return found, ()
        dead = {name for name in self.dead if name in found and not getweakrefcount(found[name])}
        return {name: value for name, value in found.items() if name not in dead} if dead else found, dead

    def left_out(self) -> Mapping[str, Any]:
        """Return what `read` leaves out as long as it does not change."""
        return {} if self.table is None else self.table.code


def of_table(name: str, table: AttributeTable, write: Write, remove: Remove = None) -> Scope:
    """Return the scope of the attributes of a module, a class or an object."""
    return Scope(name, table, write, remove, table)


class ScopeMark(NamedTuple):
    """A moment in a search for scopes."""

    changing: int
    fixed: int
    """Numbers of scopes."""
    counts: dict[str, int]


class FoundScopes:
    """Scopes in the order in which they were found, each under a name of its own."""

    def __init__(self) -> None:
        self.changing: list[Scope] = []
        self.fixed: FixedTables[Scope] = FixedTables()
        """Those whose values never change in place."""
        self._holders = 0
        self.by_name: dict[str, Scope] = {}
        self._counts: dict[str, int] = {}
        """The number of scopes with each name: a module of the script and a dict in another may share one."""

    def add(self, scope: Scope) -> None:
        """Add a scope, unless there are too many."""
        if len(self.changing) < _MOST_SCOPES:
            self.changing.append(self._named(scope))

    def add_fixed(self, scope: Scope, table: Mapping[str, Any], names: Collection[str], holder: Any = None) -> None:
        """Add the scope of these variables in a table, and the object that may exchange it, unless there are too many such objects."""
        self._holders += holder is not None
        if holder is None or self._holders <= _MOST_SCOPES:
            self.fixed.add(self._named(scope), table, names, holder)

    def mark(self) -> ScopeMark:
        """Return a mark after the present scopes."""
        return ScopeMark(len(self.changing), len(self.fixed), dict(self._counts))

    def since(self, mark: ScopeMark) -> list[Scope]:
        """Return the scopes after a mark."""
        return [*self.changing[mark.changing :], *[*self.fixed][mark.fixed :]]

    def cut(self, mark: ScopeMark) -> None:
        """Forget the scopes after a mark."""
        for scope in self.since(mark):
            del self.by_name[scope.name]
        del self.changing[mark.changing :]
        self.fixed.cut(mark.fixed)
        self._counts = dict(mark.counts)

    def _named(self, scope: Scope) -> Scope:
        count = self._counts[scope.name] = self._counts.get(scope.name, 0) + 1
        scope = scope if count == 1 else replace(scope, name=f"{scope.name} ({count})")
        self.by_name[scope.name] = scope
        return scope
