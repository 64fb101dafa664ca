"""The variables of each scope as they were at first: when the loop began, or when their module was imported."""

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deadpool_run.worker.variables.left_alone import fingerprint_of, forget_data
from deadpool_run.worker.variables.modules import LEAVES
from deadpool_run.worker.variables.scope import Scope
from deadpool_run.worker.variables.unchanged import Parts, are_same, parts_of
from deadpool_run.worker.variables.values.kinds.functions import CODE
from deadpool_run.worker.variables.values.objects import OpaqueError, UnkeptDataError
from deadpool_run.worker.variables.values.tensors import is_data
from deadpool_run.worker.variables.values.unkept import Unkept
from deadpool_run.worker.variables.values.writer import ValueWriter, encoded

OPAQUE = ["opaque"]
UNKEPT = ["unkept"]
GONE = ["gone"]
DEAD = ["dead"]
"""The node of a variable that the code which has it assigns again before it reads it."""
LOST = "lost"


@dataclass(frozen=True, slots=True)
class First:
    """A variable as it was at first."""

    node: Any
    value: Any
    """If its content is kept, the object, or a weak reference to a tensor. If it is data that is not kept, an `Unkept`. Else a
    weak reference, or None if its class allows none."""
    parts: Parts | None = None
    """See `parts_of`."""
    encoded: bytes = b""
    """The node, to compare with."""
    progress: str = ""
    """`fingerprint_of` an object that snapshots leave alone."""


class Baseline:
    """The first values of all variables, by scope."""

    def __init__(self, writer: Callable[[str], ValueWriter], is_scope: Callable[[object], bool]) -> None:
        """`writer` returns a writer that names objects, and `is_scope` whether a scope has the content of an object."""
        self._writer, self._is_scope = writer, is_scope
        self._values: dict[str, dict[str, First]] = {}
        self._code: dict[str, Mapping[str, Any]] = {}
        self._late: set[str] = set()
        self._left_alone: dict[str, dict[str, str]] = {}

    def note(self, scopes: Iterable[Scope], own: Collection[str], *, late: bool = False) -> None:
        """Note the values of some scopes. `own` are the script's modules. `late`: another process may find other values there."""
        for scope in scopes:
            values = scope.read().items()
            self._values[scope.name] = {name: self._first(f"{scope.name}.{name}", value, own) for name, value in values}
            self._code[scope.name] = scope.left_out()
            first = self._values[scope.name].items()
            if left_alone := {name: each.progress for name, each in first if each.progress}:
                self._left_alone[scope.name] = left_alone
            if late:
                self._late.add(scope.name)

    def of(self, scope: str) -> Mapping[str, First]:
        """Return the variables of a scope, without functions and classes that it leaves out."""
        return self._values.get(scope, {})

    def all(self) -> Iterator[tuple[str, str, First]]:
        """Yield scope, name and first value of each variable."""
        for scope, values in self._values.items():
            yield from ((scope, name, first) for name, first in values.items())

    def code_of(self, scope: str) -> Mapping[str, Any]:
        """Return the functions and classes that a scope leaves out while they are as they were."""
        return self._code.get(scope, {})

    def with_left_alone(self) -> Collection[str]:
        """Return the names of the scopes with objects that snapshots leave alone."""
        return self._left_alone.keys()

    def advanced(self, scope: Scope) -> Iterator[tuple[str, str]]:
        """Yield the variables with objects that snapshots leave alone and that are not as at first, each with its progress."""
        now = scope.all()
        for name, first in self._left_alone[scope.name].items():
            if name in now and (progress := fingerprint_of(now[name])) != first:
                yield name, progress

    def forget_results(self, scopes: Iterable[Scope]) -> None:
        """Have functions with `functools.lru_cache` compute again, as in a replacement, if their results are data.

        The scopes are those of `with_left_alone`.
        """
        for scope in scopes:
            now = scope.all()
            for name in self._left_alone[scope.name]:
                forget_data(now.get(name))

    def is_late(self, scope: str) -> bool:
        """Return whether another process may have found other values in the scope."""
        return scope in self._late

    def maybe_changed(self, scope: str, now: Mapping[str, Any]) -> Iterator[tuple[str, Any, First | None]]:
        """Yield the variables that may have changed. Cheap, because it runs for all of them in each step."""
        first, is_late = self.of(scope), scope in self._late
        for name, value in now.items():
            was = first.get(name)
            if was is not None and not (is_late and was.encoded):
                kept = was.value
                if kept is value:
                    if type(value) in LEAVES or (was.parts is not None and are_same(was.parts)):
                        continue
                elif was.node is OPAQUE and kept is not None and kept() is value:
                    continue
            yield name, value, was

    def gone(self, scope: str, now: Mapping[str, Any]) -> Collection[str]:
        """Return the variables that existed at first and do not now."""
        first = self.of(scope)
        return () if first.keys() <= now.keys() else [name for name in first if name not in now]

    def _first(self, name: str, value: Any, own: Collection[str]) -> First:
        try:
            node = self._writer(name).write(value)
            if isinstance(node, list) and node[0] == "reference":
                return First(OPAQUE, (lambda: value) if isinstance(value, CODE) else _weak(value))
            kept = weakref.ref(value) if is_data(value) else value
            is_scope = isinstance(node, list) and node[0] == "scope"
            return First(node, kept, () if is_scope else parts_of(value, own, self._is_scope), encoded(node))
        except UnkeptDataError as error:
            return First(UNKEPT, Unkept(value, str(error), inside=True, arrays=True))
        except OpaqueError:
            return First(OPAQUE, _weak(value), progress=fingerprint_of(value))


def _weak(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return None


def is_lost(node: Any) -> bool:
    """Return whether a node is that of data which a snapshot lacks."""
    return isinstance(node, list) and node[0] == LOST
