"""Trees of plain values, such as a `state_dict()`: copies of them, and their encoding as JSON and raw bytes without pickle.

The JSON refers to tensors, arrays and byte strings by index. Other values that torch's `weights_only` loader accepts (sets,
dtypes, sizes) are saved with `torch.save`. A JSON object with the key `!` encodes a value that JSON does not have.
"""

import ast
import copy
import ctypes
import enum
import io
import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pickle import PicklingError, UnpicklingError
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from deadpool_run.errors import ScriptError, SnapshotError

_TAG = "!"
_REMEDY = "Let state_dict() return tensors, numbers, strings, lists and dicts instead."
_PLAIN = frozenset({type(None), bool, int, str})
"""Their values are their own JSON."""
_TABLES = frozenset({GetSetDescriptorType, MemberDescriptorType})
_OBJECT: Any = object
ATOMS = frozenset({type(None), bool, int, float, str, bytes, complex, torch.dtype, torch.device})
"""Types of immutable values without parts."""


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the bytes of a dense tensor's elements, in order. Does not need numpy."""
    flat = tensor.detach().cpu().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.nbytes) if flat.nbytes else b""


def tensor_of(data: bytes, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Return these bytes as a tensor of one dimension. Does not need numpy."""
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)


def is_current(device: torch.device) -> bool:
    """Return whether a device is the CUDA device that this process uses."""
    indexed = device.type == "cuda" and device.index is not None
    return indexed and torch.cuda.is_initialized() and device.index == torch.cuda.current_device()


def name_of_device(device: torch.device) -> str:
    """Return the name of a tensor's device: `cuda` for the one that this process uses. A replacement may use another one."""
    return "cuda" if is_current(device) else str(device)


def device_of(name: str) -> torch.device:
    """Return the device that has this name, with its number."""
    return torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else torch.device(name)


def has_state(obj: object) -> bool:
    """Return whether an object has `state_dict()` and `load_state_dict()`."""
    return callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that have a value, also those in slots."""
    state = object.__getstate__(value)
    parts = state if isinstance(state, tuple) else (state,)
    return {name: each for part in parts for name, each in (part or {}).items()}


def table_of(value: Any) -> dict[str, Any]:
    """Return the table of an object's attributes, without those in slots. No code of its class is run, not even a proxy's.

    Empty for a class that has a property in its place.
    """
    return object.__getattribute__(value, "__dict__") if has_table(type(value)) else {}


def has_table(kind: type) -> bool:
    """Return whether the objects of a class have a table of attributes that its class has not hidden behind a property."""
    for each in kind.__mro__:
        if "__dict__" in each.__dict__:
            return type(each.__dict__["__dict__"]) in _TABLES
    return False


class _Plain:
    """A class without a part written in C."""


def has_only_attributes(kind: type) -> bool:
    """Return whether all state of a class's objects is in attributes: no class that it derives from is written in C, or has slots."""
    return (
        kind.__weakrefoffset__ == _Plain.__weakrefoffset__
        and kind.__basicsize__ == _Plain.__basicsize__
        and kind.__dictoffset__ == _Plain.__dictoffset__  # one slot is as large as what a class without slots has
        and kind.__reduce_ex__ is _OBJECT.__reduce_ex__
    )


def is_simple(kind: type) -> bool:
    """Return whether a class's objects are nothing but attributes, and every process finds it by name. Modules are not simple."""
    return (
        has_only_attributes(kind)
        and kind.__reduce__ is _OBJECT.__reduce__
        and has_table(kind)
        and not hasattr(kind, "__del__")
        and not issubclass(kind, nn.Module | Optimizer | enum.Enum)
        and class_of_name(kind.__module__, kind.__qualname__) is kind
    )


def simple_object(kind: Any, attributes: Mapping[str, Any]) -> Any:
    """Return a new object of a class that is simple. No code of the class is run."""
    made = object.__new__(kind)
    table_of(made).update(attributes)
    return made


def class_of_name(module: str, name: str) -> Any:
    """Return the class of this name in a Python module; None if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) else None


def objects_in(obj: object, depth: int = 4) -> Iterator[object]:
    """Yield an object and those that it refers to, so many levels deep: in attributes, dicts, lists, tuples and sets, not in modules."""
    yield obj
    if depth == 0 or isinstance(obj, (Tensor, nn.Module, str, bytes, int, float)):
        return
    children: Iterable[Any]
    if isinstance(obj, dict):
        children = obj.values()
    elif isinstance(obj, (list, tuple, set)):
        children = obj
    else:
        children = getattr(obj, "__dict__", {}).values()
    for child in list(children):
        yield from objects_in(child, depth - 1)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of nested dicts, lists, tuples and deques."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple | deque):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(value)


def copied(tree: Any, memo: dict[int, Any] | None = None) -> Any:
    """Return a deep copy of `tree`. Tensors are cloned on their device. With one `memo` for several trees, an object is copied once."""
    kind, memo = type(tree), {} if memo is None else memo
    if kind in ATOMS:
        return tree
    if kind in (dict, OrderedDict):
        return kind((key, copied(value, memo)) for key, value in tree.items())
    if kind in (list, tuple):
        return kind([copied(value, memo) for value in tree])
    if kind is deque:
        return deque((copied(value, memo) for value in tree), tree.maxlen)
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    try:
        return copy.deepcopy(tree, memo)
    except TypeError as error:
        raise ScriptError(
            f"a {kind.__module__}.{kind.__qualname__} in the state of a protected object cannot be copied: {error}.\n{_REMEDY}"
        ) from error


class TreeWriter:
    """Encodes trees as JSON, and collects the `blobs` and `tensors` that the JSON refers to."""

    def __init__(self) -> None:
        self.blobs: list[bytes] = []
        self.tensors: list[Tensor] = []
        self._objects: dict[int, Any] = {}
        """The objects so far, by identity."""

    def encode(self, tree: Any, path: str) -> Any:
        """Return the JSON of `tree`. `path` names it in the `ScriptError` for an unsupported value."""
        kind = type(tree)
        if kind in _PLAIN or (kind is float and math.isfinite(tree)):
            return tree
        if kind is dict and all(type(key) is str for key in tree) and _TAG not in tree:
            return {
                key: value if type(value) in _PLAIN else self.encode(value, f"{path}.{key}")
                for key, value in tree.items()
            }
        if kind is list:
            return [
                value if type(value) in _PLAIN else self.encode(value, f"{path}[{index}]")
                for index, value in enumerate(tree)
            ]
        return self._tagged(kind, tree, path)

    def _tagged(self, kind: type, tree: Any, path: str) -> dict[str, Any]:  # noqa: C901, PLR0911 - one line for each kind
        if kind is float:
            return {_TAG: "float", "is": repr(tree)}
        if kind is complex:
            return {_TAG: "complex", "is": [self.encode(tree.real, path), self.encode(tree.imag, path)]}
        if kind in (tuple, torch.Size):
            return {_TAG: kind.__name__, "is": self.encode(list(tree), path)}
        if kind in (dict, OrderedDict):
            items = [[self.encode(key, path), self.encode(value, f"{path}.{key}")] for key, value in tree.items()]
            return {_TAG: kind.__name__, "is": items}
        if kind is deque:
            return {_TAG: "deque", "is": self.encode(list(tree), path), "most": tree.maxlen}
        if kind is bytes:
            return {_TAG: "bytes", "at": self._blob(tree)}
        if isinstance(tree, Tensor):
            self.tensors.append(tree.detach())
            return {_TAG: "tensor", "at": len(self.tensors) - 1}
        numpy = sys.modules.get("numpy")  # if numpy is not imported, the value is not numpy's
        if numpy is not None and isinstance(tree, numpy.ndarray | numpy.generic) and tree.dtype.kind in "biufc":
            # The shape [-1] stands for a scalar, as opposed to a 0-dimensional array.
            shape = list(tree.shape) if isinstance(tree, numpy.ndarray) else [-1]
            return {_TAG: "array", "dtype": tree.dtype.str, "shape": shape, "at": self._blob(tree.tobytes())}
        if kind is torch.device and is_current(tree):
            return {_TAG: "device", "is": name_of_device(tree)}
        if isinstance(tree, enum.Enum) and _is_found(kind, tree):
            return {_TAG: "enum", "is": [kind.__module__, kind.__qualname__, tree._name_]}
        if is_simple(kind):
            return self._object(kind, tree, path)
        return {_TAG: "torch", "at": self._blob(_saved(tree, path))}

    def _object(self, kind: type, value: Any, path: str) -> dict[str, Any]:
        if id(value) in self._objects:
            raise ScriptError(
                f"{path} is an object that the state has in another place, too, and a snapshot would make two of it.\n{_REMEDY}"
            )
        self._objects[id(value)] = value
        attributes = dict(table_of(value))
        if any(isinstance(each, nn.Parameter) for each in tensors_in(attributes)):
            raise ScriptError(
                f"{path} is an object with a parameter, of which a snapshot would make a copy.\n{_REMEDY}"
            )
        return {_TAG: "object", "of": [kind.__module__, kind.__qualname__], "is": self.encode(attributes, path)}

    def _blob(self, data: bytes) -> int:
        self.blobs.append(data)
        return len(self.blobs) - 1


class TreeReader:
    """Decodes trees from JSON; `blob` and `tensor` return what the JSON refers to, by index.

    `tensor` also gets the live value in the same place, if there is one, and returns a tensor on its device and mesh.
    """

    def __init__(self, *, blob: Callable[[int], bytes], tensor: Callable[[int, Any], Tensor]) -> None:
        self._blob = blob
        self._tensor = tensor

    def decode(self, node: Any, like: Any = None) -> Any:
        """Return the tree of a JSON node. Raises `SnapshotError` for a node of an unknown kind."""
        if isinstance(node, list):
            return [self.decode(value, _child(like, index)) for index, value in enumerate(node)]
        if not isinstance(node, dict):
            return node
        if _TAG not in node:
            return {key: self.decode(value, _child(like, key)) for key, value in node.items()}
        return self._untagged(node, like)

    def _untagged(self, node: dict[str, Any], like: Any) -> Any:  # noqa: C901, PLR0911 - one line for each kind
        match node[_TAG]:
            case "float":
                return float(node["is"])
            case "complex":
                real, imaginary = self.decode(node["is"])
                return complex(real, imaginary)
            case "tuple" | "Size" as name:
                return (tuple if name == "tuple" else torch.Size)(self.decode(node["is"], like))
            case "dict" | "OrderedDict" as name:
                pairs = ((self.decode(key), value) for key, value in node["is"])
                items = ((key, self.decode(value, _child(like, key))) for key, value in pairs)
                return dict(items) if name == "dict" else OrderedDict(items)
            case "bytes":
                return self._blob(node["at"])
            case "tensor":
                return self._tensor(node["at"], like)
            case "array":
                return array_of(node["dtype"], node["shape"], self._blob(node["at"]))
            case "device":
                return device_of(node["is"])
            case "deque" | "enum" | "object" as tag:
                return self.of_class(tag, node, like)
            case "torch":
                return torch.load(io.BytesIO(self._blob(node["at"])), weights_only=True)
            case other:
                raise SnapshotError(
                    f"a snapshot holds a value of the unknown kind {other!r}: another version of deadpool-run wrote it"
                )

    def of_class(self, tag: str, node: dict[str, Any], like: Any) -> Any:
        """Return the value of a node that `weights_only` would not load."""
        if tag == "enum":
            return _member_of(*node["is"])
        if tag == "deque":
            return deque(self.decode(node["is"], like), node["most"])
        kind = class_of_name(*node["of"])
        if kind is None or not is_simple(kind):
            raise SnapshotError(
                f"a snapshot holds an object of {'.'.join(node['of'])}, and this process has no such class"
            )
        return simple_object(kind, self.decode(node["is"], table_of(like)))


def _is_found(kind: type, member: enum.Enum) -> bool:
    """Return whether every process finds a member by the names of its class and itself. Several flags together have no name."""
    return class_of_name(kind.__module__, kind.__qualname__) is kind and kind.__members__.get(member._name_) is member


def _member_of(module: str, name: str, member: str) -> Any:
    """Return the member of an enumeration. Raises `SnapshotError` if this process does not have it."""
    kind = class_of_name(module, name)
    if not (isinstance(kind, enum.EnumType) and member in kind.__members__):
        raise SnapshotError(f"a snapshot holds {module}.{name}.{member}, and this process has no such member")
    return kind.__members__[member]


def _child(tree: Any, key: Any) -> Any:
    if isinstance(tree, dict):
        return tree.get(key)
    if isinstance(tree, list | tuple | deque) and isinstance(key, int) and key < len(tree):
        return tree[key]
    return None


def name_of_dtype(dtype: Any) -> str:
    """Return the name of the class of an array's elements, with the names and places of their fields."""
    import numpy as np  # noqa: PLC0415 - as below

    return dtype.str if dtype.fields is None else repr(np.lib.format.dtype_to_descr(dtype))


def dtype_of(name: str) -> Any:
    """Return the class of elements that has this name."""
    import numpy as np  # noqa: PLC0415 - as below

    return np.lib.format.descr_to_dtype(ast.literal_eval(name)) if name.startswith(("[", "{")) else np.dtype(name)


def array_of(dtype: str, shape: list[int], data: bytes) -> Any:
    """Return the array of these bytes in C order; a scalar for the shape [-1]."""
    import numpy as np  # noqa: PLC0415 - only a state that holds an array needs numpy

    flat = np.frombuffer(data, dtype=dtype_of(dtype))
    return flat[0] if shape == [-1] else flat.reshape(shape).copy()


def _saved(value: Any, path: str) -> bytes:
    """Return `value` as saved by torch. Raises `ScriptError` if it cannot be loaded as `weights_only`."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (PicklingError, UnpicklingError, TypeError, AttributeError, RuntimeError) as error:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ScriptError(
            f"{path} is a {kind}, which a snapshot cannot hold, because snapshots are never pickled.\n{_REMEDY}"
        ) from error
    return buffer.getvalue()
