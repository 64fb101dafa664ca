"""The script's own variables that change in its step loop: part of each snapshot, restored before a step is repeated.

Scripts carry state from step to step in variables: counters, averages, lists of losses, generators. What a variable held when
the loop began is known on every rank, because set-up is run again by a replacement. A snapshot has what differs from that.
"""

import contextlib
import operator
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import Tensor, nn

from deadpool_run.worker.variables.frames import note_loop
from deadpool_run.worker.variables.scopes import Scope, Scopes
from deadpool_run.worker.variables.values import (
    MOST_VALUES,
    Objects,
    OpaqueError,
    TooLargeError,
    ValueReader,
    ValueWriter,
    differ,
)

_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes})
_FLAT = (list, tuple)
_LARGE = 1024
"""Elements. A smaller tensor is a loss, a norm or a count, and may be for the log only."""
_COUNT = 1_000_000
"""Larger numbers may be times, or bytes of memory."""
_OPAQUE = ["opaque"]
_TOO_LARGE = ["too large"]
_GONE = ["gone"]

Changed = dict[str, dict[str, Any]]
"""Nodes, by scope and variable."""


@dataclass(frozen=True, slots=True)
class _Before:
    """A variable when the loop began."""

    node: Any
    value: Any
    """The object, if its content can be kept; else a weak reference, or None if there can be none."""
    parts: tuple[Any, ...] | None
    """The items of a list of plain values."""
    size: int

    def is_still(self, value: Any) -> bool:
        """Return whether the variable surely holds what it held. Cheap: it is asked in each step."""
        if self.node is _OPAQUE:
            return self.value is not None and self.value() is value
        if self.node is _TOO_LARGE:
            return _size(value) == self.size
        return value is self.value and (type(value) in _LEAVES or _is_same(value, self.parts))


class Variables:
    """The script's variables: their values when its loop began, and now. For the main thread, in the loop."""

    def __init__(self) -> None:
        self._scopes: Scopes | None = None
        self._objects = Objects()
        self._before: dict[str, dict[str, _Before]] = {}
        self._large: dict[str, tuple[int, int]] = {}
        self._reported: set[str] = set()
        self.too_large: list[str] = []
        """The lists and dicts that have grown too large to be kept, each once; for the caller to report and to empty."""

    def begin(self, excluded: Collection[int] = (), modules: Iterable[tuple[str, nn.Module]] = ()) -> None:
        """Find the variables; the loop begins.

        `excluded` are identities of objects that are kept otherwise; of `modules`, by name, the plain attributes are kept.
        """
        note_loop()
        self._scopes = Scopes(excluded, modules)
        self._objects = Objects()
        self._before = {
            scope.name: {name: self._note(f"{scope.name}.{name}", value) for name, value in scope.read().items()}
            for scope in self._scopes
        }

    def take(self) -> bytes:
        """Return what the variables hold, as far as it differs from when the loop began."""
        if self._scopes is None:
            return b""
        found: Changed = {}
        writer = self._writer()
        for scope in self._scopes:
            before = self._before.get(scope.name, {})
            now = scope.read()
            changed = {
                name: node
                for name, value in now.items()
                if (node := self._changed(writer, _shown(scope.name, name), value, before.get(name))) is not None
            }
            changed |= {name: _GONE for name in before if name not in now}
            if changed:
                found[scope.name] = changed
        return msgspec.msgpack.encode(found)

    def put(self, taken: bytes) -> None:
        """Set the variables to what `take` returned, here or in another process of the rank."""
        if self._scopes is None or not taken:
            return
        changed: Changed = msgspec.msgpack.decode(taken)
        reader = ValueReader(self._objects, self._scopes.named)
        values = {scope: _read_all(reader, nodes) for scope, nodes in changed.items()}
        for scope in self._scopes:
            nodes = changed.get(scope.name, {})
            now = scope.read()
            wanted = self._unchanged(scope, nodes) | values.get(scope.name, {})
            wanted = {name: value for name, value in wanted.items() if name not in now or now[name] is not value}
            if wanted:
                scope.write(wanted)
            if scope.remove is not None:
                gone = {name for name, node in nodes.items() if node == _GONE}
                known = (self._before.get(scope.name, {}).keys() | nodes.keys()) - gone
                for name in scope.read().keys() - known:
                    scope.remove(name)

    def counts(self) -> dict[str, int]:
        """Return the small whole numbers in variables, by name."""
        return {
            _shown(scope.name, name): value
            for scope in self._scopes or ()
            for name, value in scope.read().items()
            if type(value) is int and abs(value) < _COUNT
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the larger tensors in variables, by name, without those that are parts of a graph or want gradients."""
        for scope in self._scopes or ():
            assert self._scopes is not None
            for name, value in scope.read().items():
                for part, tensor in () if self._scopes.is_scope(value) else _tensors_of(value):
                    if not tensor.requires_grad and tensor.numel() >= _LARGE and not tensor.is_meta:
                        yield _shown(scope.name, f"{name}{part}"), tensor

    def _writer(self, *, noting: str = "") -> ValueWriter:
        assert self._scopes is not None
        return ValueWriter(self._objects, self._scopes.name_of, self._scopes.modules, noting=noting)

    def _note(self, name: str, value: Any) -> _Before:
        parts = None
        if type(value) in _FLAT and all(type(part) in _LEAVES for part in value):
            parts = tuple(value)
        try:
            return _Before(self._writer(noting=name).write(value), value, parts, 0)
        except TooLargeError:
            return _Before(_TOO_LARGE, None, None, _size(value))
        except OpaqueError:
            return _Before(_OPAQUE, _weak(value), None, 0)

    def _changed(self, writer: ValueWriter, name: str, value: Any, before: _Before | None) -> Any:
        """Return the node of a variable; None if it is as it was when the loop began."""
        if before is not None and before.is_still(value):
            return None
        try:
            node = writer.write(value)
        except TooLargeError:
            self._note_large(name, value)
            return _OPAQUE
        except OpaqueError:
            unknown = before is not None and before.node is _OPAQUE and before.value is None
            return None if unknown else _OPAQUE
        return node if before is None or differ(node, before.node) else None

    def _note_large(self, name: str, value: Any) -> None:
        earlier = self._large.get(name)
        self._large[name] = now = (id(value), _size(value))
        if earlier is not None and earlier[0] == now[0] and earlier != now and name not in self._reported:
            self._reported.add(name)
            self.too_large.append(name)

    def _unchanged(self, scope: Scope, changed: Collection[str]) -> dict[str, Any]:
        """Return the variables of a scope that held at the snapshot what they held when the loop began."""
        found = {}
        for name, before in self._before.get(scope.name, {}).items():
            if name in changed or before.node is _TOO_LARGE:
                continue
            if before.node is _OPAQUE:
                value = None if before.value is None else before.value()
                if value is not None:  # else the script has dropped it
                    found[name] = value
            else:
                found[name] = self._as_before(before)
        return found

    def _as_before(self, before: _Before) -> Any:
        """Return the value when the loop began; undo what has changed in it since."""
        if isinstance(before.node, list) and before.node[0] != "scope" and self._differs(before):
            return ValueReader(self._objects).read(before.node)
        return before.value

    def _differs(self, before: _Before) -> bool:
        try:
            return differ(self._writer().write(before.value), before.node)
        except OpaqueError:
            return True


def _read_all(reader: ValueReader, nodes: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, node in nodes.items():
        if node not in (_OPAQUE, _GONE):
            with contextlib.suppress(OpaqueError, KeyError):
                found[name] = reader.read(node)
    return found


def _shown(scope: str, name: str) -> str:
    return f"{scope}.{name}".removeprefix("__main__.")


def _tensors_of(value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield "", value
    elif type(value) in (list, tuple, dict) and len(value) <= MOST_VALUES:
        parts = list(value.items() if type(value) is dict else enumerate(value))
        yield from ((f"[{key!r}]", part) for key, part in parts if isinstance(part, Tensor))


def _is_same(value: Any, parts: tuple[Any, ...] | None) -> bool:
    return parts is not None and len(value) == len(parts) and all(map(operator.is_, value, parts))


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _weak(value: Any) -> Any:
    try:
        return weakref.ref(value)
    except TypeError:
        return None
