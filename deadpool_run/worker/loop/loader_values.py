"""Values in the attributes of a loader's dataset, `collate_fn` and samplers: now, and as they were at the start of an epoch.

The order of an epoch, and what its workers load, depend on the values that these objects had when the epoch began. A script may
change them later: for its next epoch, or in every step.
"""

import secrets
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import msgspec
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from deadpool_run.errors import RefusedError
from deadpool_run.worker.codec import attributes_of
from deadpool_run.worker.loop.sampler_order import samplers
from deadpool_run.worker.process.script_files import own_modules
from deadpool_run.worker.variables.baseline import OPAQUE, UNKEPT, Baseline, First
from deadpool_run.worker.variables.library_objects import has_only_values
from deadpool_run.worker.variables.scope import Scope
from deadpool_run.worker.variables.values.kinds.own_objects import is_own, set_attributes
from deadpool_run.worker.variables.values.lost import LostValue, raise_refused
from deadpool_run.worker.variables.values.objects import Objects, OpaqueError, UnkeptDataError
from deadpool_run.worker.variables.values.reader import ValueReader
from deadpool_run.worker.variables.values.tensors import MOST_BYTES, TensorCopies, TensorCopy
from deadpool_run.worker.variables.values.unkept import Unkept
from deadpool_run.worker.variables.values.writer import ValueWriter, encoded

_MOST_OF_DATASET = 1 << 20
"""The limit on the bytes of one attribute outside of samplers. A larger one is mostly the data itself."""
_MOST_SCOPES = 256
_MOST_PARTS = 256
_CONTAINERS = (list, tuple, dict)
_PLAIN = frozenset({each.__name__ for each in _CONTAINERS})
_GONE = ["gone"]
_UNKEPT, _OPAQUE = "unkept", "opaque"
_MISSING = object()

Taken = dict[str, Any]
"""The result of `LoaderValues.take`: bytes, and a list of large tensors."""
_Place = tuple[str, str]
"""The names of an object and of its attribute."""


@dataclass(frozen=True, slots=True)
class _Change:
    """An attribute that was set, with its value before and the node of that."""

    place: _Place
    before: Any
    node: Any
    now: Any


class LoaderValues:
    """The values of a loader's objects that differ from those in set-up, which every process of the rank makes."""

    def __init__(self, loader: Any) -> None:
        """Note the present values. A loader that is no `DataLoader` has none."""
        self._own = frozenset(name for name, _, _ in own_modules())
        self._objects = Objects()
        self._scopes: dict[str, Scope] = {}
        self._of_samplers: frozenset[str] = frozenset()
        self._marks: dict[_Place, tuple[Any, int]] = {}
        self._written: dict[_Place, tuple[Any, Any]] = {}
        """The last signature and node of containers, because to write one takes milliseconds."""
        self._copies = TensorCopies()
        self._has_workers = isinstance(loader, DataLoader) and loader.num_workers > 0
        if isinstance(loader, DataLoader):
            self._look("dataset", loader.dataset)
            self._look("collate_fn", loader.collate_fn)
            others = frozenset(self._scopes)
            for each in samplers(loader):
                self._look("batch_sampler" if each is loader.batch_sampler else "sampler", each)
            self._of_samplers = frozenset(self._scopes) - others
        self._baseline = Baseline(self._writer, self._is_scope)
        self._baseline.note(self._scopes.values(), self._own)
        self._copies.begun()

    def take(self, *, only_samplers: bool = False) -> Taken:
        """Return the values that differ from those in set-up; an empty dict if there are none."""
        found: dict[str, dict[str, Any]] = {}
        for (scope, name), node in self._differences().items():
            if scope in self._of_samplers or not only_samplers:
                found.setdefault(scope, {})[name] = node
        large: list[Tensor] = []

        def numbered(copy: TensorCopy) -> int:
            large.append(copy.tensor)
            return len(large) - 1

        return {"nodes": encoded(found, numbered), "large": large} if found else {}

    def have_samplers_changed(self, taken: Taken) -> bool:
        """Return whether the attributes of samplers differ from what `take` returned."""
        before = {place: node for place, node in _nodes(taken).items() if place[0] in self._of_samplers}
        return encoded(list(before.items())) != encoded(list(_nodes(self.take(only_samplers=True)).items()))

    def put(self, taken: Taken) -> None:
        """Set the values to what `take` returned, here or in another process of the rank.

        The use of data that was not kept is refused, except in a dataset that this process loads from: most of that is a cache.
        """
        _, missing = self._apply(taken, self._scopes)
        for scope, name, why in missing:
            if why and (self._has_workers or scope in self._of_samplers):
                lost = LostValue(f"{scope}.{name} of the loader", why, raise_refused)
                self._scopes[scope].write({name: lost})

    @contextmanager
    def as_of(self, start: Taken, workers: Taken | None = None, *, for_new_workers: bool = False) -> Iterator[None]:
        """Set the values to those of an epoch's start, and put the present ones back at the end.

        `workers` has the values outside of samplers, if the workers were made before. With `for_new_workers`, raises `RefusedError`
        if one of these was not kept, and has changed since.
        """
        others = self._scopes.keys() - self._of_samplers
        changes, _ = self._apply(start, self._of_samplers)
        changed, missing = self._apply(start if workers is None else workers, others)
        try:
            if for_new_workers:
                _refuse_changed(missing)
            yield
        finally:
            for change in (*changes, *changed):
                self._put_back(change)

    # --- reading and setting -------------------------------------------------------------------------------------

    def _look(self, name: str, value: Any) -> None:
        """Add an object, and those inside it."""
        kind = type(value)
        if self._is_scope(value) or len(self._scopes) >= _MOST_SCOPES:
            return
        if kind in (list, tuple) and len(value) <= _MOST_PARTS:
            for index, part in enumerate(value):
                self._look(f"{name}[{index}]", part)
        elif kind is dict and len(value) <= _MOST_PARTS:
            for key, part in list(value.items()):
                self._look(f"{name}[{key!r}]", part)
        elif kind is MethodType:
            self._look(name, value.__self__)
        elif isinstance(value, Dataset | Sampler) or is_own(kind, self._own) or has_only_values(value, self._is_scope):
            while name in self._scopes:
                name += "'"
            self._objects.add(name, value)
            write, remove = partial(set_attributes, value), partial(object.__delattr__, value)
            self._scopes[name] = Scope(name, partial(_attributes, value), write, remove)
            for key, part in _attributes(value).items():
                self._look(f"{name}.{key}", part)

    def _is_scope(self, value: object) -> bool:
        return self._objects.name_of(value) is not None

    def _writer(self, name: str) -> ValueWriter:
        of_sampler = name.partition(".")[0].partition("[")[0] in ("sampler", "batch_sampler")
        most = MOST_BYTES if of_sampler else _MOST_OF_DATASET
        return ValueWriter(None, self._objects, self._own, copies=self._copies, most_bytes=most)

    def _differences(self) -> dict[_Place, Any]:
        """Return the nodes of the present values that are not as in set-up."""
        self._copies.next(thorough=False)
        found: dict[_Place, Any] = {}
        for scope in self._scopes.values():
            now = scope.read()
            for name, value, first in self._baseline.maybe_changed(scope.name, now):
                if (node := self._node((scope.name, name), value, first)) is not None:
                    found[scope.name, name] = node
            found |= {(scope.name, name): _GONE for name in self._baseline.of(scope.name) if name not in now}
        return found

    def _node(self, place: _Place, value: Any, first: First | None) -> Any:
        """Return the node of a value; None if it is as in set-up."""
        if first is not None and first.node is UNKEPT and first.value.is_still(value):
            return None
        if first is not None and first.node is OPAQUE and first.value is None:
            return None  # its class allows no weak references
        signature, known = _signature(value), self._written.get(place)
        if signature is not None and known is not None and known[0] == signature:
            return known[1]
        try:
            node = self._writer(place[0]).write(value)
        except UnkeptDataError as error:
            return [_UNKEPT, self._mark(place, value, Unkept(value, str(error))), str(error)]
        except OpaqueError:
            return [_OPAQUE, self._mark(place, value, None), ""]
        found = None if first is not None and encoded(node) == first.encoded else node
        if signature is not None and _is_plain(node):
            self._written[place] = signature, found
        return found

    def _mark(self, place: _Place, value: Any, record: Unkept | None) -> int:
        """Return a number that stays the same while a value that is not kept stays the same."""
        known = self._marks.get(place)
        if known is not None and type(known[0]) is Unkept and record is not None and known[0].is_still(value):
            return known[1]
        if known is not None and record is None and known[0] is value:
            return known[1]
        number = secrets.randbits(62)
        self._marks[place] = (value if record is None else record), number
        return number

    def _apply(self, taken: Taken, scopes: Collection[str]) -> tuple[list[_Change], list[tuple[str, str, str]]]:
        """Set what is not as taken. Return the changes, and the attributes that cannot be set, with the reason."""
        wanted, present = _nodes(taken), self._differences()
        reader = ValueReader(None, self._objects.get, own=self._own, large=taken.get("large", ()))
        changes, missing = [], []
        for place in dict.fromkeys((*wanted, *present)):
            where, name = place
            node, has = wanted.get(place), present.get(place)
            if where not in scopes or encoded(node) == encoded(has):
                continue
            first = self._baseline.of(where).get(name)
            if node is None:
                node = _GONE if first is None else first.node
            scope = self._scopes[where]
            before = scope.read().get(name, _MISSING)
            try:
                now = self._value(reader, node, first, before)
            except (OpaqueError, KeyError):
                missing.append((where, name, _reason(node, first)))
                continue
            if has is None:
                has = _GONE if first is None else first.node
            changes.append(_Change(place, before, has, now))
            self._set(scope, name, before, now)
        return changes, missing

    def _value(self, reader: ValueReader, node: Any, first: First | None, into: Any) -> Any:
        """Return the value of a node. Raises `OpaqueError` if it was not kept."""
        if node == _GONE:
            return _MISSING
        if node is OPAQUE and first is not None and first.value is not None:
            found = first.value()
            if found is not None:
                return found
        if isinstance(node, list) and node[0] in (_UNKEPT, _OPAQUE):
            raise OpaqueError
        return reader.read(node, into)

    def _put_back(self, change: _Change) -> None:
        """Undo a change, unless the sampler itself has set the attribute, to the same value: its iterator may refer to that."""
        scope, name = self._scopes[change.place[0]], change.place[1]
        current = scope.read().get(name, _MISSING)
        is_kept = not (isinstance(change.node, list) and change.node[0] in (_UNKEPT, _OPAQUE, *_GONE))
        if current is not _MISSING and not is_kept and current is not change.now and change.node != _GONE:
            return
        if is_kept and current is not _MISSING and self._is_written_as(change, current):
            return
        if is_kept and change.now is change.before:  # it was filled
            before = ValueReader(None, self._objects.get, own=self._own).read(change.node, change.before)
        else:
            before = change.before
        self._set(scope, name, current, before)

    def _is_written_as(self, change: _Change, value: Any) -> bool:
        if value is change.now and change.now is not change.before:
            return False  # not the script's object
        try:
            return encoded(self._writer(change.place[0]).write(value)) == encoded(change.node)
        except OpaqueError:
            return False

    @staticmethod
    def _set(scope: Scope, name: str, before: Any, value: Any) -> None:
        if value is _MISSING:
            if before is not _MISSING and scope.remove is not None:
                scope.remove(name)
        elif value is not before:
            scope.write({name: value})


def _attributes(value: Any) -> dict[str, Any]:
    """Return an object's attributes, without memory that other processes see."""
    return {
        name: each
        for name, each in attributes_of(value).items()
        if not (isinstance(each, Tensor) and not each.is_cuda and each.is_shared())
    }


def _signature(value: Any) -> Any:
    """Return the class and the content of a container as bytes; None for other values. Fast."""
    if type(value) not in _CONTAINERS:
        return None
    try:
        return type(value), msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _is_plain(node: Any) -> bool:
    """Return whether a node consists of numbers, strings and containers of these: a signature shows each change."""
    if not isinstance(node, list):
        return True
    return node[0] in _PLAIN and all(_is_plain(each) for part in node[1:] for each in part)


def _nodes(taken: Taken) -> dict[_Place, Any]:
    found = msgspec.msgpack.decode(taken["nodes"]) if taken else {}
    return {(scope, name): node for scope, nodes in found.items() for name, node in nodes.items()}


def _reason(node: Any, first: First | None) -> str:
    """Return why the value of a node was not kept; empty for an object."""
    if node is UNKEPT and first is not None:
        return str(first.value.why)
    return str(node[2]) if len(node) > 2 and node[0] == _UNKEPT else ""


def _refuse_changed(missing: list[tuple[str, str, str]]) -> None:
    for scope, name, why in missing:
        reason = why or "it holds objects that snapshots do not keep"
        raise RefusedError(
            f"batches(): {scope}.{name} of the loader has changed since its workers were started, and snapshots do not keep it: "
            f"{reason}. New workers would load other batches than those of an unfailed run.\nChange it before the loop only, keep "
            "it smaller than 1 MiB and of numbers, strings and tensors, or load in the main process (num_workers=0)."
        )
