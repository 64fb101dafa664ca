"""Objects that no snapshot holds, and that variables refer to: functions, modules, process groups, data loaders.

A script that exchanges one for another refers to what every process of the rank has: from set-up, or from the first steps, which a
replacement rehearses. Those have names. An object that was made later has a number, by which only the process that has it finds it.
"""

from collections.abc import Callable, Iterable
from typing import Any

from deadpool_run.worker.compat.made import is_step_of_scheduler
from deadpool_run.worker.state.numbered import MadeLater
from deadpool_run.worker.variables.scope import Scope
from deadpool_run.worker.variables.values.kinds.functions import is_bound_in_c, is_code
from deadpool_run.worker.variables.values.objects import OF_LOADERS, USED, Objects, OpaqueError, UnkeptDataError

TAG = "made later"
_MOST_LATER = 256
"""Objects that were made later and can be put back: the newest ones."""
_MOST_ITEMS = 256


class References:
    """The objects that have names, and those that have numbers. None is kept alive."""

    def __init__(self) -> None:
        self.named = Objects(weakly=True)
        self.made_later = MadeLater(_MOST_LATER)
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

    def rehearsed(self, scopes: Iterable[Scope], write: Callable[[Any], Any]) -> None:
        """Name also what the first steps have made."""
        self._name(scopes, write, ", made in the first steps", parts=True)
        self._rehearsed = True

    def add(self, scopes: Iterable[Scope], write: Callable[[Any], Any]) -> None:
        """Name also what the scopes of a module have, as it was imported."""
        self._name(scopes, write, "")

    def next(self) -> None:
        """Begin another snapshot."""
        self._last, self._before = {}, self._last

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
        """Name code, objects on which results depend, and with `parts` also others in containers, if they cannot be written."""
        for scope in scopes:
            for name, value in scope.all().items():
                for part, each in _with_items(value):
                    may_be = isinstance(each, USED) or is_bound_in_c(each) or (parts and part != "")
                    if is_code(each) or (may_be and _is_opaque(each, write)):
                        self.named.add(f"{scope.name}.{name}{part}{when}", each)


def is_made_later(node: Any) -> bool:
    """Return whether a node is one of `References.later`."""
    return isinstance(node, list) and node[0] == TAG


def _with_items(value: Any) -> list[tuple[str, Any]]:
    if type(value) not in (list, tuple, dict):
        return [("", value)]
    items = value.items() if type(value) is dict else enumerate(value)
    return [(f"[{key!r}]", each) for key, each in items if type(key) in (int, str)] if len(value) <= _MOST_ITEMS else []


def _is_opaque(value: Any, write: Callable[[Any], Any]) -> bool:
    try:
        write(value)
    except UnkeptDataError:
        return False
    except OpaqueError:
        return True
    return False
