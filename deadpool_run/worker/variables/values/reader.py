"""Decoder of the trees that `ValueWriter` makes. No code of the script's classes is run."""

import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from deadpool_run.worker.codec import class_of_name, device_of, table_of, tensor_of
from deadpool_run.worker.state import generators
from deadpool_run.worker.state.numbered import MadeLater
from deadpool_run.worker.variables.values import sets
from deadpool_run.worker.variables.values.kinds import distributed_tensors, functions, iterators, library_values, queues
from deadpool_run.worker.variables.values.kinds.own_objects import (
    TABLES,
    are_same,
    empty_container,
    immutable_base_of,
    made,
    plain_value,
    replace_attributes,
    set_attributes,
    set_attributes_of_module,
)
from deadpool_run.worker.variables.values.layouts import into_array, into_tensor, is_alike, layout_of_tensor
from deadpool_run.worker.variables.values.lost import raise_refused
from deadpool_run.worker.variables.values.objects import Objects, OpaqueError
from deadpool_run.worker.variables.values.plain import FACTORIES
from deadpool_run.worker.variables.values.tensors import TensorCopy, is_object_array
from deadpool_run.worker.variables.values.unkept import with_lost_graph
from deadpool_run.worker.variables.values.views import view_of
from deadpool_run.worker.variables.values.writer import DICTS, SEQUENCES

_CODE = frozenset({"code", "method", "bound", "partial"})


class _Gone:
    """An object to which nothing refers any more."""


class ValueReader:
    """Decodes nodes that were written together, in the same order."""

    def __init__(  # noqa: PLR0913 - what is written in another way
        self,
        objects: Objects | None = None,
        scope: Callable[[str], Any] = str,
        *,
        reference: Callable[[str], Any] = str,
        state: Callable[[str], Any] = str,
        made_later: MadeLater | None = None,
        own: Collection[str] = (),
        large: Sequence[Tensor] = (),
        refuse: Callable[[str], NoReturn] = raise_refused,
    ) -> None:
        """`scope` returns the object whose content is written elsewhere, by name, and `reference` one of which only the name is written.

        `state` returns a tensor of an optimizer. All three raise `KeyError` for what this process does not have. `made_later` are those that this process
        has made since.
        `own` are the script's Python modules, and `large` the large tensors, by number.
        A backward through the graph of a tensor, which cannot be kept, calls `refuse`.
        """
        self._objects = objects or Objects()
        self._by_name = {"scope": scope, "id": scope, "reference": reference, "state": state}
        self._made_later = made_later or MadeLater(0)
        self._own = own
        self._large = large
        self._refuse = refuse
        self._made: dict[int | str, Any] = {}
        self._filled: dict[int, Any] = {}
        """The parts of a module that this process still has, by the numbers of those that are read into them."""

    def read(self, node: Any, into: Any = None) -> Any:  # noqa: C901, PLR0911, PLR0912 - one line for each kind
        """Return the value of a node. `into` is an object to fill and return, if it is of the same kind.

        Raises `OpaqueError` for a class that this process does not have.
        """
        if not isinstance(node, list):
            return node
        tag, *parts = node
        if tag in ("is", "new", "same"):
            return self._shared(tag, *parts)
        if tag in SEQUENCES:
            return self._sequence(SEQUENCES[tag], parts, into)
        if tag in DICTS:
            return self._dict(DICTS[tag], parts, into)
        if tag in generators.KINDS:
            return generators.with_state(tag, self.read(parts[0]), into)
        if tag in library_values.TAGS:
            *names, arguments = parts
            return library_values.of_parts(tag, names, list(map(self.read, arguments)), into, self._class)
        if tag in self._by_name:
            found = self._by_name[tag](parts[0])
            return id(found) if tag == "id" else found
        if tag == "hole":
            return self._there(self._objects.named(parts[0]))
        if tag == "closure":
            return self._closure(*parts)
        if tag == distributed_tensors.TAG:
            shard, mesh, layout = parts
            return distributed_tensors.of_parts(self.read(shard), self.read(mesh), layout, into)
        if tag in ("view", "base"):
            return self._view(tag, parts)
        if tag == "own container":
            return self._own_container(parts, into)
        if tag == "iterator":
            made_by, arguments, state = parts
            return iterators.of_parts(made_by, list(map(self.read, arguments)), *map(self.read, state))
        return self._code(tag, parts) if tag in _CODE else self._simple(tag, parts, into)

    def _view(self, tag: str, parts: list[Any]) -> Any:
        """Return a view of an object that is written elsewhere, or inside the node itself."""
        if tag == "base":
            return view_of(self.read(parts[0]), *parts[1:])
        return view_of(self._shared(*parts[:2]), *parts[2:])

    def _code(self, tag: str, parts: list[Any]) -> Any:
        if tag == "partial":
            function, arguments, names, named = parts
            values = map(self.read, named)
            return partial(self.read(function), *map(self.read, arguments), **dict(zip(names, values, strict=True)))
        if tag == "bound":
            return MethodType(*map(self.read, parts))
        where, name = parts
        is_code = tag == "code"
        found = functions.code_of_name(where, name, self._own) if is_code else functions.bound(self.read(where), name)
        if found is None:
            raise OpaqueError
        return found

    def _closure(self, tag: str, name: str, nodes: list[Any]) -> Any:
        """Return the function of this name, with what its closure held."""
        function, key = self.read([tag, name]), f"{tag} {name}"
        if key not in self._made:
            self._made[key] = function  # its closure may refer to it
            for cell, node in zip(function.__closure__, nodes, strict=True):
                cell.cell_contents = self.read(node)
        return function

    def _shared(self, tag: str, key: Any, node: Any = None) -> Any:
        """Return an object that several variables may share: by name if it existed when the loop began, else by number.

        If objects of its class cannot be filled, all these variables get the same new object.
        """
        if key not in self._made:
            into = self._objects.named(key) if tag == "is" else self._filled.get(key)
            if node is None:  # it was not written, because it has not changed
                return self._there(into)
            if (shell := self._shell(node, into)) is not None:
                self._made[key] = into = shell  # what is in it may refer to it
            try:
                self._made[key] = self.read(node, into)
            except (OpaqueError, KeyError):
                self._made.pop(key, None)
                raise
        return self._made[key]

    @staticmethod
    def _there(found: Any) -> Any:
        if found is None:
            raise OpaqueError
        return found

    def _shell(self, node: Any, into: Any) -> Any:
        """Return the object that `read` fills with what is in it: `into`, or an empty one; None for any other kind."""
        tag, parts = (node[0], node[1:]) if isinstance(node, list) else ("", [])
        if tag in ("object", "module"):
            kind = self._class(*parts[:2])
            if into is None and len(parts) > 4:
                numbered = self._made_later.weakly if tag == "module" else self._made_later.values
                into = numbered.get(parts[4])
            return into if type(into) is kind else made(kind)
        if tag == "own container":
            return self._new_container(parts, into)
        if tag == "deque":
            return into if type(into) is deque and into.maxlen == parts[1] else deque(maxlen=parts[1])
        if tag == "defaultdict":
            return into if type(into) is defaultdict else defaultdict(_factory(parts))
        if tag in ("list", "set") or tag in DICTS:
            plain = SEQUENCES.get(tag) or DICTS[tag]
            return into if type(into) is plain else plain()
        return None

    def _simple(self, tag: str, parts: list[Any], into: Any) -> Any:  # noqa: C901, PLR0911, PLR0912 - one line for each kind
        match tag:
            case "variables":
                return vars(sys.modules[parts[0]])
            case "lock":
                return (threading.RLock if parts[0] == "RLock" else threading.Lock)()
            case "text":
                return str(parts[0], errors="surrogatepass")
            case "int":
                return int(parts[0])
            case "complex":
                return complex(*parts)
            case "queue":
                kind, limit, unfinished, content = parts
                return queues.filled(into, kind, limit, unfinished, [self.read(each) for each in content])
            case "own value":
                return self._own_value(parts, into)
            case "tensor":
                dtype, shape, data, *layout = parts
                return into_tensor(into, tensor_of(data, getattr(torch, dtype)).reshape(shape), layout)
            case "large":
                device, copy, *layout = parts
                return into_tensor(into, self._large_tensor(copy).to(device_of(device)), layout)
            case "graph":
                return with_lost_graph(self.read(parts[0]), self._refuse)
            case "leaf" | "parameter":
                return self._leaf(*parts, into=into, kind=Tensor if tag == "leaf" else Parameter)
            case "objects":
                return _objects(*parts, into=into, read=self.read)
            case "results":
                kind = getattr(torch.return_types, parts[0], None)
                return self._there(kind)(map(self.read, parts[1]))
            case "array":
                return into_array(*parts, into=into)
            case "large array":
                dtype, shape, copy, *layout = parts
                return into_array(dtype, shape, self._large_tensor(copy).numpy().tobytes(), *layout, into=into)
            case "named":
                return tuple.__new__(self._class(*parts[:2]), map(self.read, parts[2]))
            case "weak":
                return weakref.ref(_Gone() if parts[0] is None else self.read(parts[0]))
        kind = self._class(*parts[:2])
        found = into if type(into) is kind else made(kind)
        if tag == "module":
            self._fill_tables(found, *parts[2:4])
        attributes = self._attributes(*parts[2:4])
        (set_attributes_of_module if tag == "module" else replace_attributes)(found, attributes)
        return found

    def _fill_tables(self, module: Any, names: list[str], nodes: list[Any]) -> None:
        """Have the parameters, buffers and modules inside a module read into those that it has: an optimizer may have them, too."""
        for name, node in zip(names, nodes, strict=True):
            table = vars(module).get(name)
            if name in TABLES and table and isinstance(node, list) and node[0] == "new" and node[2][0] == "dict":
                for key, part in zip(*node[2][1:], strict=True):
                    if isinstance(part, list) and part[0] == "new" and key in table:
                        self._filled[part[1]] = table[key]

    def _class(self, module: str, name: str) -> Any:
        found = class_of_name(module, name) if module else self._by_name["reference"](name)
        if not isinstance(found, type):
            raise OpaqueError
        return found

    def _large_tensor(self, which: TensorCopy | int) -> Tensor:
        return self._large[which] if isinstance(which, int) else which.tensor

    def _leaf(self, node: Any, gradient: Any, trained: bool, *, into: Any, kind: type[Tensor]) -> Tensor:
        value: Tensor = self.read(node)
        is_like = type(into) is kind and into.is_leaf and into.requires_grad == trained
        is_like = is_like and is_alike(into, value, layout_of_tensor(value))
        found = into if is_like else Parameter(value, trained) if kind is Parameter else value.requires_grad_()
        if is_like:
            with torch.no_grad():
                found.copy_(value)
        found.grad = None if gradient is None else self.read(gradient).clone()
        return found

    def _own_value(self, parts: list[Any], into: Any) -> Any:
        """Return `into` if it has the same plain value: a script may compare it by identity."""
        module, name, names, values, node = parts
        kind, attributes, plain = self._class(module, name), self._attributes(names, values), self.read(node)
        base = immutable_base_of(kind, (kind.__module__,))
        is_there = type(into) is kind and are_same(plain_value(base, into), plain)
        found = into if is_there else base.__new__(kind, plain)
        set_attributes(found, attributes)
        return found

    def _own_container(self, parts: list[Any], into: Any) -> Any:
        _, _, names, values, (tag, *content) = parts
        target = self._new_container(parts, into)
        attributes = self._attributes(names, values)  # first, as they were written
        if tag in SEQUENCES:
            _fill(target, SEQUENCES[tag], [self.read(each) for each in content[0]])
        else:
            _fill(target, DICTS[tag], self._items(content))
        if (table := table_of(target)) is not target:
            table.clear()
            set_attributes(target, attributes)
        return target

    def _new_container(self, parts: list[Any], into: Any) -> Any:
        """Return `into` if it is alike, else an empty container of the script's class."""
        module, name, _, _, (_, *content) = parts
        kind = self._class(module, name)
        made = empty_container(kind)
        is_alike = type(into) is kind
        if isinstance(made, deque):
            deque.__init__(made, (), content[1])
            is_alike = is_alike and into.maxlen == made.maxlen
        if isinstance(made, defaultdict) and not is_alike:
            made.default_factory = _factory(content)
        return into if is_alike else made

    def _sequence(self, kind: Any, parts: list[Any], into: Any) -> Any:
        values = [self.read(each) for each in parts[0]]
        if kind in (tuple, frozenset):
            return kind(values)
        target: Any = into if type(into) is kind and (kind is not deque or into.maxlen == parts[1]) else None
        if target is None:
            target = deque(maxlen=parts[1]) if kind is deque else kind()
        return _fill(target, kind, values)

    def _dict(self, kind: Any, parts: list[Any], into: Any) -> Any:
        target = into if type(into) is kind else kind()
        if kind is defaultdict and target is not into:
            target = defaultdict(_factory(parts))
        return _fill(target, dict if issubclass(kind, dict) and kind is not OrderedDict else kind, self._items(parts))

    def _attributes(self, names: list[str], nodes: list[Any]) -> dict[str, Any]:
        return dict(zip(names, map(self.read, nodes), strict=True))

    def _items(self, parts: list[Any]) -> dict[Any, Any]:
        return dict(zip(map(self.read, parts[0]), map(self.read, parts[1]), strict=True))


def _fill(target: Any, base: Any, values: Any) -> Any:
    """Replace the content of a container with the methods of `base`."""
    if base is set:
        sets.fill(target, values)
        return target
    base.clear(target)
    if base is OrderedDict:  # its `update` calls methods of a derived class
        for key, each in values.items():
            OrderedDict.__setitem__(target, key, each)
        return target
    (base.extend if base in (list, deque) else base.update)(target, values)
    return target


def _factory(parts: list[Any]) -> type:
    if len(parts) < 3:
        raise OpaqueError  # a function of the script's
    return FACTORIES[parts[2]]


def _objects(shape: list[int], nodes: list[Any], *, into: Any, read: Callable[[Any], Any]) -> Any:
    numpy = sys.modules["numpy"]
    is_like = is_object_array(into) and list(into.shape) == shape
    found = into if is_like else numpy.empty(shape, object)
    for at, node in zip(numpy.ndindex(*shape), nodes, strict=True):
        found[at] = read(node)
    return found
