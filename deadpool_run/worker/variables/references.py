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

    def rehearsed(self, scopes: Scopes, write: Callable[[Any], Any], is_known: Callable[[object], bool]) -> None:
        """Name also what the first steps have made, and in containers others than those that the loop began with (`is_known`)."""
        when = ", made in the first steps"
        self._name(scopes, write, when, parts=True)
        self._name_inside(scopes, write, when, is_known)
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

    def _name(self, scopes: Iterable[Scope], write: Callable[[Any], Any], when: str, *, parts: bool = False) -> None:
        """Name code, objects on which results depend, and with `parts` also others in containers, if they cannot be written.

        An iterator in a container gets no name: a replacement has it at another position.
        """
        for scope in scopes:
            for name, value in scope.all().items():
                for part, each in _with_items(value):
                    is_part = parts and part != "" and not is_iterator(each)
                    may_be = isinstance(each, USED) or is_bound_in_c(each) or is_part
                    if is_code(each) or (may_be and _is_opaque(each, write)):
                        self.named.add(f"{scope.name}.{name}{part}{when}", each)

    def _name_inside(
        self, scopes: Scopes, write: Callable[[Any], Any], when: str, is_known: Callable[[object], bool]
    ) -> None:
        """Name what cannot be written in nested containers, and in the script's objects."""
        for scope in scopes:
            for name, value in scope.all().items():
                for part, each in islice(_parts_of(value, scopes), _MOST_PARTS):
                    is_new = part != "" and not is_known(each) and self.named.name_of(each) is None
                    if is_new and not is_iterator(each) and _is_opaque(each, write):
                        self.named.add(f"{scope.name}.{name}{part}{when}", each)


def is_made_later(node: Any) -> bool:
    """Return whether a node is one of `References.later`."""
    return isinstance(node, list) and node[0] == TAG


def _with_items(value: Any) -> list[tuple[str, Any]]:
    return _items_of(value) if type(value) in (list, tuple, dict) else [("", value)]


def _items_of(value: Any) -> list[tuple[str, Any]]:
    """Return the items of a container, each with the end of its name."""
    if len(value) > _MOST_ITEMS:
        return []
    items = list(value.items()) if isinstance(value, dict) else enumerate(list(value))
    return [(f"[{key!r}]", each) for key, each in items if type(key) in (int, str)]


def _parts_of(value: Any, within: Scopes, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the parts of containers, and of the script's objects that are no scopes, each with the end of its name."""
    items: list[tuple[str, Any]] = [] if depth == _DEEPEST or within.is_scope(value) else _content_of(value, within)
    if not items:
        yield name, value
    for end, each in items:
        yield from _parts_of(each, within, name + end, depth + 1)


def _content_of(value: Any, within: Scopes) -> list[tuple[str, Any]]:
    if is_own(type(value), within.modules):
        return [(f".{name}", each) for name, each in attributes_of(value).items()]
    return _items_of(value) if type(value) in _CONTAINERS else []


def _is_opaque(value: Any, write: Callable[[Any], Any]) -> bool:
    try:
        write(value)
    except UnkeptDataError:
        return False
    except OpaqueError:
        return True
    return False
