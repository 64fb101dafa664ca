"""Plain values of variables as trees that MessagePack can hold, and back. No code of the script's classes is run.

A number, a string or None is its own node. Any other value is a list that begins with a tag. Objects that can change have an
identity, which two variables may share: those that were there when the loop began are known by name in every process of the
rank (`Objects`), others by number within what is written together.
"""

import math
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from deadpool_run.worker.codec import raw_bytes
from deadpool_run.worker.variables.own_objects import attributes_of, is_own, set_attributes

_PLAIN = frozenset({type(None), bool, float, str, bytes})
_DICTS = {each.__name__: each for each in (dict, OrderedDict, Counter, defaultdict)}
_SEQUENCES = {each.__name__: each for each in (list, tuple, set, frozenset, deque)}
_INT64 = 1 << 63
MOST_VALUES = 4096
"""So many numbers, strings and containers are kept of one variable."""
_MOST_BYTES = 64 << 10
"""So many bytes are kept of the tensors, arrays and strings of one variable."""
_DEEPEST = 20
_MAKERS: tuple[Any, ...] = (object.__new__, SimpleNamespace.__new__)


class OpaqueError(Exception):
    """A value that cannot be kept: a file, an iterator, a large tensor."""


class TooLargeError(OpaqueError):
    """A value of plain parts that are too many."""


class Objects:
    """The objects that every process of a rank has when the loop begins, by name."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._objects: dict[str, Any] = {}  # keeps them alive, so that identities are not used again

    def add(self, name: str, obj: Any) -> None:
        """Note an object under a new name."""
        self._names[id(obj)] = name
        self._objects[name] = obj

    def name_of(self, obj: Any) -> str | None:
        """Return the name of an object; None if it was made later."""
        return self._names.get(id(obj))

    def named(self, name: str) -> Any:
        """Return the object; None if this process has none of that name."""
        return self._objects.get(name)


class ValueWriter:
    """Writes values that may share objects."""

    def __init__(
        self,
        objects: Objects | None = None,
        scope_of: Callable[[object], str | None] = lambda _: None,
        own: Collection[str] = (),
        *,
        noting: str = "",
    ) -> None:
        """Without `objects`, identities are not written. `scope_of` names an object whose content is written elsewhere.

        `own` are the modules whose objects are written with their attributes. With `noting`, objects are added to `objects`, under
        names that begin so.
        """
        self._objects = objects
        self._scope_of = scope_of
        self._own = own
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
                del self._made[key]  # nothing that is written has them
            raise

    def _write(self, value: Any) -> Any:  # noqa: PLR0911 - one line for each kind
        kind = type(value)
        self._values += 1
        if self._values > MOST_VALUES:
            raise TooLargeError
        if kind is str or kind is bytes:
            self._count_bytes(len(value))
            return value
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if -_INT64 <= value < _INT64 else ["int", str(value)]
        if kind is complex:
            return ["complex", value.real, value.imag]
        if (name := self._scope_of(value)) is not None:
            return ["scope", name]
        if kind in (tuple, frozenset) or self._objects is None:
            return self._content(kind, value)
        return self._identified(self._objects, kind, value)

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
        if isinstance(value, Tensor):
            return self._tensor(value)
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.ndarray | numpy.generic):
            return self._array(value)
        return self._nested(kind, value)

    def _count_bytes(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes > _MOST_BYTES:
            raise OpaqueError

    def _tensor(self, value: Tensor) -> Any:
        plain = type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided
        if not plain or value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
            raise OpaqueError
        self._count_bytes(value.nbytes)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), raw_bytes(value)]

    def _array(self, value: Any) -> Any:
        if value.dtype.kind not in "biufc" or type(value).__module__ != "numpy":
            raise OpaqueError
        self._count_bytes(value.nbytes)
        return ["array", value.dtype.str, list(value.shape) if value.ndim else None, value.tobytes()]

    def _nested(self, kind: type, value: Any) -> Any:
        if id(value) in self._within or len(self._within) > _DEEPEST:
            raise OpaqueError
        self._within.add(id(value))
        try:
            if kind in _SEQUENCES.values():
                if len(value) > MOST_VALUES:
                    raise TooLargeError
                most = [value.maxlen] if kind is deque else []
                values = self._all(value)
                return [
                    kind.__name__,
                    sorted(values, key=repr) if isinstance(value, set | frozenset) else values,
                    *most,
                ]
            if kind in _DICTS.values():
                if len(value) > MOST_VALUES:
                    raise TooLargeError
                return [kind.__name__, self._all(value.keys()), self._all(value.values())]
            if issubclass(kind, tuple) and hasattr(kind, "_fields"):
                return ["named", kind.__module__, kind.__qualname__, self._all(value)]
            if is_own(kind, self._own) and kind.__new__ in _MAKERS:
                attributes = attributes_of(value)
                return ["object", kind.__module__, kind.__qualname__, list(attributes), self._all(attributes.values())]
            return self._generator(kind, value)
        finally:
            self._within.discard(id(value))

    def _all(self, values: Iterable[Any]) -> list[Any]:
        try:
            return [self._write(each) for each in values]
        except RuntimeError as error:  # another thread changed its size meanwhile
            raise OpaqueError from error

    def _generator(self, kind: type, value: Any) -> Any:
        if kind is random.Random:
            return ["random", ValueWriter().write(value.getstate())]
        if kind is torch.Generator and value.device.type == "cpu":
            return ["generator", raw_bytes(value.get_state())]
        if kind.__module__ == "numpy.random._generator":
            return ["numpy", ValueWriter().write(value.bit_generator.state)]
        if kind.__module__ == "numpy.random.mtrand" and hasattr(value, "get_state"):
            return ["mtrand", ValueWriter().write(value.get_state(legacy=False))]
        raise OpaqueError


class ValueReader:
    """Makes values of nodes that were written together, in the same order."""

    def __init__(self, objects: Objects | None = None, scope: Callable[[str], Any] = str) -> None:
        """`scope` returns the object whose content is written elsewhere, by name."""
        self._objects = objects or Objects()
        self._scope = scope
        self._made: dict[int, Any] = {}

    def read(self, node: Any, into: Any = None) -> Any:  # noqa: PLR0911 - one line for each kind
        """Return the value of a node. `into` is an object to fill, if it is of the same kind; then that is returned.

        Raises `OpaqueError` for a class that this process does not have.
        """
        if not isinstance(node, list):
            return node
        tag, *parts = node
        if tag == "is":
            return self.read(parts[1], self._objects.named(parts[0]))
        if tag == "new":
            self._made[parts[0]] = made = self.read(parts[1])
            return made
        if tag == "same":
            return self._made[parts[0]]
        if tag in _SEQUENCES:
            return self._sequence(_SEQUENCES[tag], parts, into)
        if tag in _DICTS:
            return self._dict(_DICTS[tag], parts, into)
        if tag in _GENERATORS:
            return _GENERATORS[tag](*map(self.read, parts), into)
        if tag == "scope":
            return self._scope(parts[0])
        return self._simple(tag, parts, into)

    def _simple(self, tag: str, parts: list[Any], into: Any) -> Any:
        match tag:
            case "int":
                return int(parts[0])
            case "complex":
                return complex(*parts)
            case "tensor":
                return _tensor(*parts, into=into)
            case "array":
                return _array(*parts, into=into)
            case "named":
                return tuple.__new__(_class(*parts[:2]), map(self.read, parts[2]))
        kind = _class(*parts[:2])
        made = kind.__new__(kind)
        set_attributes(made, dict(zip(parts[2], map(self.read, parts[3]), strict=True)))
        return made

    def _sequence(self, kind: Any, parts: list[Any], into: Any) -> Any:
        values = [self.read(each) for each in parts[0]]
        if kind in (tuple, frozenset):
            return kind(values)
        target: Any = into if type(into) is kind and (kind is not deque or into.maxlen == parts[1]) else None
        if target is None:
            target = deque(maxlen=parts[1]) if kind is deque else kind()
        target.clear()
        (target.update if kind is set else target.extend)(values)
        return target

    def _dict(self, kind: Any, parts: list[Any], into: Any) -> Any:
        target = into if type(into) is kind else kind()
        if kind is defaultdict and target is not into:
            raise OpaqueError  # it makes new values with a function
        values = dict(zip(map(self.read, parts[0]), map(self.read, parts[1]), strict=True))
        target.clear()
        target.update(values)
        return target


def differ(one: Any, other: Any) -> bool:
    """Return whether two nodes are of different values, bit for bit."""
    if type(one) is not type(other):
        return True
    if isinstance(one, list):
        return len(one) != len(other) or any(map(differ, one, other))
    if isinstance(one, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) != math.isnan(other)
        return one != other or math.copysign(1, one) != math.copysign(1, other)
    return bool(one != other)


def _tensor(dtype: str, shape: list[int], data: bytes, *, into: Any) -> Tensor:
    kind = getattr(torch, dtype)
    made = torch.frombuffer(bytearray(data), dtype=kind) if data else torch.empty(0, dtype=kind)
    made = made.reshape(shape)
    if type(into) is Tensor and (into.dtype, list(into.shape)) == (kind, shape) and not into.requires_grad:
        return into.copy_(made)
    return made.clone()


def _array(dtype: str, shape: list[int] | None, data: bytes, *, into: Any) -> Any:
    import numpy as np  # noqa: PLC0415 - only a state that holds an array needs numpy

    flat = np.frombuffer(data, dtype=np.dtype(dtype))
    if shape is None and not isinstance(into, np.ndarray):
        return flat[0]
    made = flat.reshape(shape or ())
    if type(into) is np.ndarray and (into.dtype, into.shape) == (made.dtype, made.shape) and into.flags.writeable:
        into[...] = made
        return into
    return made.copy()


def _class(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise OpaqueError
    return found


def _random(state: Any, into: Any) -> random.Random:
    found: random.Random = into if type(into) is random.Random else random.Random()  # noqa: S311 - the script's own
    found.setstate(state)
    return found


def _torch_generator(state: bytes, into: Any) -> torch.Generator:
    found: torch.Generator = into if type(into) is torch.Generator else torch.Generator()
    return found.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _numpy_generator(state: Any, into: Any) -> Any:
    import numpy as np  # noqa: PLC0415 - only a state that has one needs numpy

    kind = getattr(np.random, state["bit_generator"])
    found = (
        into if type(into) is np.random.Generator and type(into.bit_generator) is kind else np.random.Generator(kind())
    )
    found.bit_generator.state = state
    return found


def _numpy_old_generator(state: Any, into: Any) -> Any:
    import numpy as np  # noqa: PLC0415 - only a state that has one needs numpy

    found = into if type(into) is np.random.RandomState else np.random.RandomState()
    found.set_state(state)
    return found


_GENERATORS: dict[str, Callable[..., Any]] = {
    "random": _random,
    "generator": _torch_generator,
    "numpy": _numpy_generator,
    "mtrand": _numpy_old_generator,
}
