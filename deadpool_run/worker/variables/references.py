"""Objects that no snapshot holds, and that variables refer to: functions, modules, process groups, data loaders.

A script that exchanges one for another refers to what every process of the rank has: from set-up, or from the first steps, which a
replacement rehearses. Those have names. An object that was made later has a number, by which only the process that has it finds it.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from deadpool_run.worker.codec import attributes_of
from deadpool_run.worker.compat.made import is_step_of_scheduler
from deadpool_run.worker.state.numbered import MadeLater
from deadpool_run.worker.variables.scope import Scope
from deadpool_run.worker.variables.scopes import Scopes
from deadpool_run.worker.variables.values.kinds.functions import is_bound_in_c, is_code
from deadpool_run.worker.variables.values.kinds.iterators import is_iterator
from deadpool_run.worker.variables.values.kinds.own_objects import is_own
from deadpool_run.worker.variables.values.objects import OF_LOADERS, USED, Objects, OpaqueError, UnkeptDataError

TAG = "made later"
_MOST_LATER = 256
"""Objects that were made later and can be put back: the newest ones."""
_SNAPSHOTS = 4
"""More than those that a process may go back to."""
_MOST_ITEMS = 256
_MOST_PARTS = 1024
_DEEPEST = 3
_CONTAINERS = frozenset({list, tuple, deque, dict, defaultdict, OrderedDict})


class References:
    """The objects that have names, and those that have numbers. Few are kept alive (`RecentObjects`)."""

    def __init__(self) -> None:
        self.named = Objects(weakly=True)
        self.made_later = MadeLater(_MOST_LATER, _SNAPSHOTS)
        self._last: dict[Any, int] = {}
        """Numbers, by the variables that have them in the present snapshot."""
        self._before: dict[Any, int] = {}
        """The same for the snapshot before."""
        self._rehearsed = False

    def begin(self, scopes: Iterable[Scope], write: Callable[[Any], Any]) -> None:
        """Name what variables have, as the loop begins. `write` raises `OpaqueError` for objects that no snapshot holds."""
        self.named = Objects(weakly=True)
        self._rehearsed = False
        self._name(scopes, write, "")

    def rehearsed(self, scopes: Scopes, write: Callable[[Any], Any]) -> None:
        """Name also what the first steps have made, in containers and in the script's objects too."""
        self._name(scopes, write, ", made in the first steps", within=scopes)
        self._rehearsed = True

    def add(self, scopes: Iterable[Scope], write: Callable[[Any], Any]) -> None:
        """Name also what the scopes of a module have, as it was imported."""
        self._name(scopes, write, "")

    def next(self) -> None:
        """Begin another snapshot."""
        self._last, self._before = {}, self._last
        self.made_later.parts.next()

    def later(self, name: Any, value: Any, *, was_empty: bool) -> tuple[list[Any], bool] | None:
        """Return the node of a variable's object that was made later, and whether an earlier step made it.

        None if nothing depends on it. `was_empty`: the variable was None, or did not exist. A loader that is made when it is first
        needed, for an evaluation say, is made by a replacement too.
        """
        if not isinstance(value, USED) or (was_empty and isinstance(value, OF_LOADERS)) or is_step_of_scheduler(value):
            return None
        number = self._last[name] = self.made_later.weakly.number(value)
        return [TAG, number], self._rehearsed and self._before.get(name) == number

    def of_node(self, node: Any) -> Any:
        """Return the object of such a node; None if this process does not have it."""
        return self.made_later.weakly.get(node[1])

    def _name(
        self, scopes: Iterable[Scope], write: Callable[[Any], Any], when: str, within: Scopes | None = None
    ) -> None:
        """Name code, objects on which results depend, and with `within` also others in containers, if they cannot be written.

        An iterator in a container gets no name: a replacement has it at another position.
        """
        deepest = 1 if within is None else _DEEPEST
        for scope in scopes:
            for name, value in scope.all().items():
                for part, each in islice(_parts_of(value, within, deepest), _MOST_PARTS):
                    if within is not None and self.named.name_of(each) is not None:
                        continue  # every process has it since its loop began
                    is_part = within is not None and part != "" and not is_iterator(each)
                    may_be = isinstance(each, USED) or is_bound_in_c(each) or is_part
                    if is_code(each) or (may_be and _is_opaque(each, write)):
                        self.named.add(f"{scope.name}.{name}{part}{when}", each)


def is_made_later(node: Any) -> bool:
    """Return whether a node is one of `References.later`."""
    return isinstance(node, list) and node[0] == TAG


def _parts_of(value: Any, within: Scopes | None, deepest: int, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the parts of containers, and those of the script's objects that are no scopes, each with the end of its name."""
    items = _items_of(value, within) if deepest else None
    if items is None:
        yield name, value
        return
    for key, each in items:
        yield from _parts_of(each, within, deepest - 1, f"{name}[{key!r}]")


def _items_of(value: Any, within: Scopes | None) -> Iterable[tuple[Any, Any]] | None:
    """Return the items of a container, or the attributes of an object; None for any other value."""
    kind = type(value)
    if within is not None and is_own(kind, within.modules) and not within.is_scope(value):
        return list(attributes_of(value).items())
    if kind not in _CONTAINERS:
        return None
    if len(value) > _MOST_ITEMS:
        return ()
    items = list(value.items()) if issubclass(kind, dict) else enumerate(list(value))
    return ((key, each) for key, each in items if type(key) in (int, str))


def _is_opaque(value: Any, write: Callable[[Any], Any]) -> bool:
    try:
        write(value)
    except UnkeptDataError:
        return False
    except OpaqueError:
        return True
    return False
