"""Encoder of variables' values as trees for MessagePack. No code of the script's classes is run.

A number, a string or None is its own node. Any other value is a list that begins with a tag. Objects that can change have an
identity, which two variables may share: those that existed when the loop began are known by name in every process of the
rank (`Objects`), others by number among the values that are written together.
"""

import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import msgspec
import torch
from torch import Tensor

from deadpool_run.worker.codec import table_of
from deadpool_run.worker.state import generators
from deadpool_run.worker.state.numbered import MadeLater
from deadpool_run.worker.state.state_tensors import StateTensors
from deadpool_run.worker.variables.values.data_writer import DataWriter
from deadpool_run.worker.variables.values.kinds import distributed_tensors, functions, iterators, library_values
from deadpool_run.worker.variables.values.lost import MADE_LATER, LostValue, why_lost
from deadpool_run.worker.variables.values.object_writer import ObjectWriter
from deadpool_run.worker.variables.values.objects import USED, MadeLaterError, Objects, OpaqueError, UnkeptDataError
from deadpool_run.worker.variables.values.plain import LOCKS, are_numbers, factory_of, fits, text_node
from deadpool_run.worker.variables.values.shared_memory import SharedMappings
from deadpool_run.worker.variables.values.sharing import Sharing
from deadpool_run.worker.variables.values.tensors import (
    MOST_BYTES,
    TensorCopies,
    TensorCopy,
    is_array,
    is_data,
    is_object_array,
)
from deadpool_run.worker.variables.values.views import layout_of

_PLAIN = frozenset({type(None), bool, float, str, bytes})
_WEAK = (WeakKeyDictionary, WeakValueDictionary)
DICTS: dict[str, Any] = {each.__name__: each for each in (dict, OrderedDict, Counter, defaultdict, *_WEAK)}
SEQUENCES: dict[str, Any] = {each.__name__: each for each in (list, tuple, set, frozenset, deque, WeakSet)}
_LEAST_ID = 1 << 16
"""Python has no object at a lower address."""
MOST_VALUES = 4096
"""The limit on the numbers, strings and containers of one variable."""
MOST_NUMBERS = 1 << 17
"""The limit on the numbers of a container that has only numbers."""
_TOO_MANY = f"it has more than {MOST_VALUES} values (or {MOST_NUMBERS}, if all are numbers)"
_DEEPEST = 60
_TOO_DEEP = f"it has values that are nested more than {_DEEPEST} deep"
_CODE = (*functions.CODE, MethodType, partial)


class ValueWriter(ObjectWriter):
    """Writes values that may share objects."""

    def __init__(  # noqa: PLR0913 - what is written in another way
        self,
        objects: Objects | None = None,
        named: Objects | None = None,
        own: Collection[str] = (),
        *,
        references: Objects | None = None,
        copies: TensorCopies | None = None,
        state: StateTensors | None = None,
        noting: str = "",
        made_later: MadeLater | None = None,
        most_bytes: int = MOST_BYTES,
        shared: SharedMappings | None = None,
    ) -> None:
        """Without `objects`, identities are not written. `named` are the objects whose content is written elsewhere.

        Tensors of `state` are written by name. Of `references`, only the name is written: no snapshot holds such objects, but every process of the rank has them.
        `own` are the modules whose objects are written with their attributes. Large tensors become `TensorCopy`s out of `copies`.
        With `noting`, objects are added to `objects`, under names that begin so. With `made_later`, modules and objects of libraries
        that have no name are written with their attributes and a number.
        `most_bytes` is the limit on one value. Of memory in `shared`, only what has not changed since the loop began is written.
        """
        super().__init__(objects, references or Objects(), own, made_later)
        self._named = named or Objects()
        copies = copies or TensorCopies()
        self._data = DataWriter(copies, state, most_bytes, shared, is_first=bool(noting))
        self._noting = noting
        self._made: dict[int, tuple[int, Any]] = {}
        """The objects that were made after the loop began, each with its number."""
        self._numbers = itertools.count()
        self._names = itertools.count(1)
        """The numbers in the names of the objects that this writer adds."""
        self._sharing = Sharing(self._made, copies)
        self.holes = 0
        """How many objects were written by name only, because their content cannot be kept."""
        self._values = 0
        self._within: set[int] = set()

    def write(self, value: Any) -> Any:
        """Return the node of a value. Raises `OpaqueError`."""
        self._values = 0
        self._data.begin()
        self._within.clear()
        before = len(self._made)
        try:
            return self._write(value)
        except OpaqueError:
            self._forget(before)
            raise

    def _forget(self, before: int) -> None:
        """Forget objects that no written node refers to."""
        while len(self._made) > before:
            self._made.popitem()

    def _write(self, value: Any) -> Any:  # noqa: C901, PLR0911 - one line for each kind
        kind = type(value)
        self._values += 1
        if self._values > MOST_VALUES:
            raise UnkeptDataError(_TOO_MANY)
        if kind is str or kind is bytes:
            self._data.count(len(value))
            return value if kind is bytes or value.isascii() else text_node(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return self._whole(value)
        if kind is complex:
            return ["complex", value.real, value.imag]
        if (name := self._named.name_of(value)) is not None:
            return ["scope", name]
        if library_values.is_immutable(value):
            return self._of_library(value)
        if kind is dict and (module := functions.name_of_variables(value)) is not None:
            return ["variables", module]
        if (node := self._referred(value)) is not None:
            return node
        if kind in (tuple, frozenset) or self._objects is None:
            return self._content(kind, value)
        return self._identified(self._objects, kind, value)

    def _referred(self, value: Any) -> Any:
        """Return the node of an object that every process has, of a method with its object; None for data."""
        if (name := self._references.name_of(value)) is not None:
            return self._function(["reference", name], value) if self._within else ["reference", name]
        if functions.is_bound_in_c(value):
            return ["method", self._write(value.__self__), value.__name__]
        if not isinstance(value, _CODE):
            return None
        if isinstance(value, partial):
            named = self._all(value.keywords.values())
            return [
                "partial",
                self._write(value.func),
                self._all(value.args),
                list(value.keywords),
                named,
            ]
        if isinstance(value, MethodType):
            name, owner = functions.name_of_method(value), self._write(value.__self__)
            return ["bound", self._write(value.__func__), owner] if name is None else ["method", owner, name]
        found = functions.name_of_code(value, self._own)
        if found is None:
            raise OpaqueError
        return ["code", *found]

    def _whole(self, value: int) -> Any:
        """Return the node of a number. An identity such as `id(parameter)` becomes a name: it differs in another process."""
        if not fits(value):
            return ["int", str(value)]
        if value < _LEAST_ID or (named := self._named.name_at(value)) is None:
            return value
        return ["id", named]

    def _identified(self, objects: Objects, kind: type, value: Any) -> Any:
        name = objects.name_of(value)
        if name is None and self._noting:
            name = f"{self._noting}#{next(self._names)}"
            objects.add(name, value)
            try:
                content = self._content(kind, value)
            except OpaqueError:
                objects.add(name, value, weakly=True)
                raise
            if not (isinstance(content, list) and content[0] == "view"):
                objects.add_memory(value)
            return ["is", name, content]
        if name is not None:
            return ["is", name] if id(value) in self._within else ["is", name, self._content(kind, value)]
        if id(value) in self._made:
            return ["same", self._made[id(value)][0]]
        number = next(self._numbers)
        self._made[id(value)] = number, value
        content = self._content(kind, value)
        if is_data(value):
            self._sharing.note(value)
        return ["new", number, content]

    def _hole(self, value: Any) -> list[Any]:
        """Return the node of an object in a container that is known by name, and whose content cannot be kept.

        Of a function of the script's, what its closure holds is kept. Raises `OpaqueError` for an object that was made later.
        """
        if type(value) in LOCKS.values():
            return ["lock", type(value).__name__]
        name = None if self._objects is None else self._objects.name_of(value)
        if name is None and self._noting and self._objects is not None:
            name = f"{self._noting}#{next(self._names)}"
            self._objects.add(name, value, weakly=True)
            name = self._objects.name_of(value)  # None if its class allows no weak references
        if name is None and isinstance(value, USED):
            raise MadeLaterError(MADE_LATER)
        # In a replacement, what a loop has rolled back to may refer to tensors of set-up.
        if name is None and issubclass(type(value), Tensor) and (node := self._data.of_state(value)) is not None:
            return node
        if name is None:
            raise OpaqueError
        self.holes += 1
        return self._function(["hole", name], value)

    def _function(self, node: list[Any], value: Any) -> list[Any]:
        """Return the node of an object, with what the closure of a function of the script's holds."""
        cells = functions.cells_of(value, self._own)
        if not cells or id(value) in self._within:
            return node
        before = len(self._made)
        self._within.add(id(value))
        try:
            return ["closure", *node, self._all(cells)]
        except OpaqueError:
            self._forget(before)
            return node
        finally:
            self._within.discard(id(value))

    def _content(self, kind: type, value: Any) -> Any:
        if is_data(value) and self._objects is not None and (view := self._view(self._objects, value)) is not None:
            return view
        if issubclass(kind, Tensor):  # false for a weak proxy
            return self._distributed(value) or self._data.tensor(value)
        if is_array(value):
            if is_object_array(value):
                return ["objects", list(value.shape), self._all(value.reshape(-1).tolist())]
            return self._data.array(value)
        if isinstance(value, LostValue):
            raise UnkeptDataError(why_lost(value))
        return self._nested(kind, value)

    def _view(self, objects: Objects, value: Any) -> Any:
        """Return the node of a tensor or array that shares the memory of another, whose content is kept; None for any other."""
        self._sharing.check(value)
        if (owner := self._sharing.owner_of(objects, value)) is not None:
            self._data.check_view(value)
            return ["view", *owner, *layout_of(value)]
        if (
            self._noting
            or objects.name_of(value) is not None
            or (base := self._sharing.base_of_new(objects, value)) is None
        ):
            return None
        return ["base", self._write(base), *layout_of(value)]

    def _distributed(self, value: Tensor) -> list[Any] | None:
        """Return the node of a DTensor whose mesh every process of the rank has; None for any other tensor."""
        if (parts := distributed_tensors.parts_of(value)) is None:
            return None
        if (elsewhere := self._data.kept_elsewhere(value)) is not None:
            return elsewhere
        mesh = self._named.name_of_mesh(distributed_tensors.mesh_of(value))
        if mesh is None:
            raise UnkeptDataError("it is a DTensor of a device mesh that no protected parameter has")
        shard, layout = parts
        return [distributed_tensors.TAG, self._write(shard), ["scope", mesh], layout]

    def _nested(self, kind: type, value: Any) -> Any:
        if id(value) in self._within:
            raise OpaqueError
        if len(self._within) > _DEEPEST:
            raise UnkeptDataError(_TOO_DEEP)
        self._within.add(id(value))
        try:
            if kind in SEQUENCES.values():
                return self._container(kind, value, value)
            if kind in DICTS.values():
                return self._container(kind, value, value.keys(), value.values())
            if issubclass(kind, tuple) and hasattr(kind, "_fields") and not table_of(value):
                return ["named", *self._class(kind), self._all(value)]
            if kind.__module__ == torch.return_types.__name__:
                return ["results", kind.__name__, self._all(value)]
            if (node := self._object(kind, value)) is not None:
                return node
            return self._iterator(value) if iterators.is_iterator(value) else self._generator(value)
        finally:
            self._within.discard(id(value))

    def _iterator(self, value: Any) -> list[Any]:
        try:
            parts = iterators.parts_of(value)
            if parts is not None:
                made_by, arguments, *state = parts
                return ["iterator", made_by, self._kept_whole(arguments), self._kept_whole(state)]
        except OpaqueError:
            pass
        if len(self._within) > 1:
            raise OpaqueError
        raise UnkeptDataError(iterators.WHY_LOST)

    def _container(self, kind: Any, value: Any, *columns: Iterable[Any]) -> list[Any]:
        if self._must_be_whole and kind is defaultdict and value.default_factory and not factory_of(value):
            raise OpaqueError
        many = kind.__len__(value) > MOST_VALUES
        nodes = self._numbers_of(columns) if many else [self._all(each) for each in columns]
        return [kind.__name__, *nodes, *([value.maxlen] if kind is deque else factory_of(value))]

    def _all(self, values: Iterable[Any]) -> list[Any]:
        try:
            return [self._part(each) for each in values]
        except RuntimeError as error:  # another thread changed its size meanwhile
            raise OpaqueError from error

    def _part(self, value: Any) -> Any:
        before, values, nbytes = len(self._made), self._values, self._data.nbytes
        try:
            return self._write(value)
        except (UnkeptDataError, MadeLaterError):
            raise
        except OpaqueError:
            if self._must_be_whole:  # what an iterator iterates over has a position
                if isinstance(value, USED):
                    raise MadeLaterError(MADE_LATER) from None
                raise
            self._forget(before)
            self._values, self._data.nbytes = values, nbytes
            return self._hole(value)

    def _is_held(self, value: Any) -> bool:
        is_named = self._objects is not None and self._objects.name_of(value) is not None
        named = (self._named.name_of(value), self._references.name_of(value))
        return is_named or id(value) in self._made or named != (None, None)

    def _had_only_values(self, value: Any) -> bool:
        if self._objects is not None and not self._noting and (name := self._objects.name_of(value)) is not None:
            return self._objects.has_content(name)
        if self._objects is None and self._must_be_whole:
            return True  # its parts will show
        trial = ValueWriter(None, self._named, self._own, references=self._references)
        try:
            trial._kept_whole([value])
        except OpaqueError:
            return False
        return True

    def _numbers_of(self, columns: Iterable[Iterable[Any]]) -> list[list[Any]]:
        """Return the numbers of a large container that has only numbers, at C speed."""
        found = [list(column) for column in columns]
        self._values += len(found[0])
        if self._values > MOST_NUMBERS or self._noting or not all(map(are_numbers, found)):
            raise UnkeptDataError(_TOO_MANY)
        return found

    def _generator(self, value: Any) -> Any:
        generator = generators.kind_of(value)
        if not generator:
            raise OpaqueError
        return [generator, ValueWriter().write(generators.state_of(value))]


def encoded(node: Any, number: Callable[[TensorCopy], int] = id) -> bytes:
    """Return a node as MessagePack, with numbers for the copies of large tensors. Equal for values that are equal bit for bit."""
    return msgspec.msgpack.encode(node, enc_hook=number)
