"""Encoder of variables' values as trees for MessagePack. No code of the script's classes is run.

A number, a string or None is its own node. Any other value is a list that begins with a tag. Objects that can change have an
identity, which two variables may share: those that existed when the loop began are known by name in every process of the
rank (`Objects`), others by number among the values that are written together.
"""

import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import msgspec
from torch import Tensor, nn

from deadpool_run.worker.codec import attributes_of, raw_bytes
from deadpool_run.worker.state import generators
from deadpool_run.worker.state.state_tensors import StateTensors
from deadpool_run.worker.variables.values import functions, iterators, library_values
from deadpool_run.worker.variables.values.own_objects import attributes_of_container, container_of, is_own
from deadpool_run.worker.variables.values.tensors import (
    MOST_BYTES,
    TensorCopies,
    TensorCopy,
    is_array,
    is_data,
    is_dense,
    is_freed,
    is_numeric_array,
)
from deadpool_run.worker.variables.values.unkept import LostValue, why_lost

_PLAIN = frozenset({type(None), bool, float, str, bytes})
DICTS = {each.__name__: each for each in (dict, OrderedDict, Counter, defaultdict)}
SEQUENCES = {each.__name__: each for each in (list, tuple, set, frozenset, deque)}
FACTORIES: dict[str, type] = {each.__name__: each for each in (list, dict, set, int, float, str, tuple)}
"""The factories with which a `defaultdict` can be rebuilt."""
_INT64 = 1 << 63
_LEAST_ID = 1 << 16
"""Python has no object at a lower address."""
MOST_VALUES = 4096
"""The limit on the numbers, strings and containers of one variable."""
MOST_NUMBERS = 1 << 17
"""The limit on the numbers of a container that has only numbers."""
_TOO_MANY = f"it has more than {MOST_VALUES} values (or {MOST_NUMBERS}, if all are numbers)"
_NUMBERS = frozenset({float, int, bool, type(None)})
_INLINE_BYTES = 16 << 10
"""Larger tensors and arrays have a copy of their own, which later snapshots use until they change."""
_DEEPEST = 20
_CODE = (*functions.CODE, MethodType, partial)
_MAKERS: tuple[Any, ...] = (object.__new__, SimpleNamespace.__new__)


class OpaqueError(Exception):
    """A value that cannot be kept: a file, an iterator, a model."""


class UnkeptDataError(OpaqueError):
    """Data that is not kept. The message has the reason, such as its size."""


class Objects:
    """The objects that every process of a rank has when the loop begins, by name. Its tensors can be freed."""

    def __init__(self, *, weakly: bool = False) -> None:
        """With `weakly`, all objects can be freed. Those whose class does not allow it are left out."""
        self._weakly = weakly
        self._names: dict[int, str] = {}
        self._objects: dict[str, Any] = {}  # keeps other objects alive, so that identities are not used again

    def add(self, name: str, obj: Any) -> None:
        """Note an object under a new name."""
        may_go = self._weakly or is_data(obj)
        with suppress(TypeError):  # its class allows no weak references
            self._objects[name] = weakref.ref(obj) if may_go else obj
            self._names[id(obj)] = name

    def name_of(self, obj: Any) -> str | None:
        """Return the name of an object; None if it was made later."""
        name = self._names.get(id(obj))
        return name if name is not None and self.named(name) is obj else None

    def name_at(self, identity: int) -> str | None:
        """Return the name of the object that has this identity; None if there is none."""
        name = self._names.get(identity)
        return name if name is not None and id(self.named(name)) == identity else None

    def named(self, name: str) -> Any:
        """Return the object; None if this process has none of that name."""
        found = self._objects.get(name)
        return found() if type(found) is weakref.ReferenceType else found


class ValueWriter:
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
    ) -> None:
        """Without `objects`, identities are not written. `named` are the objects whose content is written elsewhere.

        Tensors of `state` are written by name. Of `references`, only the name is written: no snapshot holds such objects, but every process of the rank has them.
        `own` are the modules whose objects are written with their attributes. Large tensors become `TensorCopy`s out of `copies`.
        With `noting`, objects are added to `objects`, under names that begin so.
        """
        self._objects = objects
        self._named = named or Objects()
        self._references = references or Objects()
        self._own = own
        self._copies = copies or TensorCopies()
        self._state = state
        self._noting = noting
        self._made: dict[int, tuple[int, Any]] = {}
        """The objects that were made after the loop began, each with its number."""
        self._values = 0
        self._bytes = 0
        self._within: set[int] = set()

    def write(self, value: Any) -> Any:
        """Return the node of a value. Raises `OpaqueError`."""
        self._values = self._bytes = 0
        self._within.clear()
        before = len(self._made)
        try:
            return self._write(value)
        except OpaqueError:
            for key in list(self._made)[before:]:
                del self._made[key]  # no written node refers to them
            raise

    def _write(self, value: Any) -> Any:  # noqa: PLR0911 - one line for each kind
        kind = type(value)
        self._values += 1
        if self._values > MOST_VALUES:
            raise UnkeptDataError(_TOO_MANY)
        if kind is str or kind is bytes:
            self._count_bytes(len(value))
            return value if kind is bytes or value.isascii() else _text(value)
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
        if (node := self._referred(value)) is not None:
            return node
        if kind in (tuple, frozenset) or self._objects is None:
            return self._content(kind, value)
        return self._identified(self._objects, kind, value)

    def _referred(self, value: Any) -> Any:
        """Return the node of an object that every process has, of a method with its object; None for data."""
        if (name := self._references.name_of(value)) is not None:
            return ["reference", name]
        if not isinstance(value, _CODE):
            return None
        if isinstance(value, partial):
            named = self._all(value.keywords.values())
            return ["partial", self._write(value.func), self._all(value.args), list(value.keywords), named]
        if isinstance(value, MethodType):
            name, owner = functions.name_of_method(value), self._write(value.__self__)
            return ["bound", self._write(value.__func__), owner] if name is None else ["method", owner, name]
        found = functions.name_of_code(value, self._own)
        if found is None:
            raise OpaqueError
        return ["code", *found]

    def _whole(self, value: int) -> Any:
        """Return the node of a number. An identity such as `id(parameter)` becomes a name: it differs in another process."""
        if not -_INT64 <= value < _INT64:
            return ["int", str(value)]
        if value < _LEAST_ID or (named := self._named.name_at(value)) is None:
            return value
        return ["id", named]

    def _identified(self, objects: Objects, kind: type, value: Any) -> Any:
        name = objects.name_of(value)
        if name is None and self._noting:
            name = f"{self._noting}#{self._values}"
            content = self._content(kind, value)
            objects.add(name, value)
            return ["is", name, content]
        if name is not None:
            return ["is", name, self._content(kind, value)]
        if id(value) in self._made:
            return ["same", self._made[id(value)][0]]
        content = self._content(kind, value)
        number = len(self._made)
        self._made[id(value)] = number, value
        return ["new", number, content]

    def _content(self, kind: type, value: Any) -> Any:
        if issubclass(kind, Tensor):  # false for a weak proxy
            return self._tensor(value)
        if is_array(value):
            return self._array(value)
        if isinstance(value, LostValue):
            raise UnkeptDataError(why_lost(value))
        return self._nested(kind, value)

    def _count_bytes(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes > MOST_BYTES:
            raise UnkeptDataError(f"it is larger than {MOST_BYTES >> 20} MiB")

    def _tensor(self, value: Tensor) -> Any:
        if type(value) is nn.Parameter or value.is_meta or self._copies.is_other(value):
            raise OpaqueError
        if self._state is not None and (name := self._state.name_of(value)) is not None:
            return ["state", name]
        if type(value) is not Tensor or not is_dense(value):
            raise UnkeptDataError(f"it is a {type(value).__name__} of layout {value.layout} on {value.device}")
        if is_freed(value):
            raise OpaqueError
        self._count_bytes(value.nbytes)
        if value.device.type == "cpu" and value.nbytes <= _INLINE_BYTES:
            plain = value.detach().resolve_conj().resolve_neg()
            node: Any = ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), raw_bytes(plain)]
        else:
            node = ["large", str(value.device), _with_room(self._copies.of_tensor(value))]
        if _has_graph(value):
            return ["graph", node]
        if value.requires_grad:
            return ["leaf", node, None if value.grad is None else self._tensor(value.grad)]
        return node

    def _array(self, value: Any) -> Any:
        if not is_numeric_array(value):
            raise OpaqueError
        kind, shape = value.dtype.str, list(value.shape) if value.ndim else None
        if value.nbytes <= _INLINE_BYTES:
            self._count_bytes(value.nbytes)
            return ["array", kind, shape, value.tobytes()]
        if not value.flags.writeable or type(value).__name__ != "ndarray":
            raise OpaqueError  # a file in memory, say
        self._count_bytes(value.nbytes)
        return ["large array", kind, shape, _with_room(self._copies.of_array(value))]

    def _nested(self, kind: type, value: Any) -> Any:  # noqa: PLR0911 - one line for each kind
        if id(value) in self._within or len(self._within) > _DEEPEST:
            raise OpaqueError
        self._within.add(id(value))
        try:
            if kind in SEQUENCES.values():
                return self._container(kind, value, value)
            if kind in DICTS.values():
                return self._container(kind, value, value.keys(), value.values())
            if issubclass(kind, tuple) and hasattr(kind, "_fields"):
                return ["named", kind.__module__, kind.__qualname__, self._all(value)]
            if is_own(kind, self._own) and kind.__new__ in _MAKERS:
                attributes = attributes_of(value)
                return ["object", kind.__module__, kind.__qualname__, list(attributes), self._all(attributes.values())]
            if (base := container_of(kind, self._own)) is not None:
                return self._own_container(kind, base, value)
            if library_values.is_kept(value):
                return self._of_library(value)
            return self._iterator(value) if iterators.is_iterator(value) else self._generator(value)
        finally:
            self._within.discard(id(value))

    def _own_container(self, kind: type, base: Any, value: Any) -> list[Any]:
        columns = [base.keys(value), base.values(value)] if issubclass(base, dict) else [list(base.__iter__(value))]
        attributes = attributes_of_container(value)
        own = [kind.__module__, kind.__qualname__, list(attributes), self._all(attributes.values())]
        return ["own container", *own, self._container(base, value, *columns)]

    def _of_library(self, value: Any) -> list[Any]:
        tag, *parts, arguments = library_values.parts_of(value)
        return [tag, *parts, self._all(arguments)]

    def _iterator(self, value: Any) -> list[Any]:
        try:
            parts = iterators.parts_of(value)
            if parts is not None:
                made_by, arguments, *state = parts
                return ["iterator", made_by, self._all(arguments), self._all(state)]
        except OpaqueError:
            pass
        if len(self._within) > 1:
            raise OpaqueError
        raise UnkeptDataError(iterators.WHY_LOST)

    def _container(self, kind: Any, value: Any, *columns: Iterable[Any]) -> list[Any]:
        many = kind.__len__(value) > MOST_VALUES
        nodes = self._numbers(columns) if many else [self._all(each) for each in columns]
        if kind in (set, frozenset):
            nodes = [sorted(each, key=repr) for each in nodes]
        return [kind.__name__, *nodes, *([value.maxlen] if kind is deque else _factory_of(value))]

    def _all(self, values: Iterable[Any]) -> list[Any]:
        try:
            return [self._write(each) for each in values]
        except RuntimeError as error:  # another thread changed its size meanwhile
            raise OpaqueError from error

    def _numbers(self, columns: Iterable[Iterable[Any]]) -> list[list[Any]]:
        """Return the numbers of a large container that has only numbers, at C speed."""
        found = [list(column) for column in columns]
        self._values += len(found[0])
        if self._values > MOST_NUMBERS or self._noting or not all(map(_are_numbers, found)):
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


def _text(value: str) -> Any:
    """Return the node of a text. The name of a file, say, may have surrogates, which MessagePack refuses."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return ["text", value.encode(errors="surrogatepass")]
    return value


def _has_graph(value: Tensor) -> bool:
    try:
        return value.grad_fn is not None
    except RuntimeError as error:  # a view of memory that was written to since, as in FSDP1
        raise OpaqueError from error


def _with_room(copy: TensorCopy | None) -> TensorCopy:
    if copy is None:
        raise UnkeptDataError("all large variables together are larger than 256 MiB")
    return copy


def _factory_of(value: Any) -> list[str]:
    factory = value.default_factory if isinstance(value, defaultdict) else None
    return [name for name, kind in FACTORIES.items() if kind is factory]


def _are_numbers(values: list[Any]) -> bool:
    if not _NUMBERS.issuperset(map(type, values)):
        return False
    whole = [each for each in values if type(each) is int]
    return not whole or (min(whole) >= -_INT64 and max(whole) < _INT64)
