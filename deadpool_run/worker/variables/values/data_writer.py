"""Encoder of tensors and arrays, small ones inline and large ones as copies. See `writer`."""

from collections.abc import Callable
from functools import partial
from typing import Any
from zlib import crc32

from torch import Tensor, nn

from deadpool_run.worker.codec import name_of_device, name_of_dtype, raw_bytes
from deadpool_run.worker.compat.modules import is_dense
from deadpool_run.worker.state.state_tensors import StateTensors
from deadpool_run.worker.variables.values.layouts import layout_of_array, layout_of_tensor
from deadpool_run.worker.variables.values.lost import MOVED, SHARED
from deadpool_run.worker.variables.values.objects import OpaqueError, UnkeptDataError
from deadpool_run.worker.variables.values.shared_memory import SharedMappings
from deadpool_run.worker.variables.values.tensors import (
    TensorCopies,
    TensorCopy,
    is_freed,
    is_numeric_array,
    is_scalar,
    sample_of,
)
from deadpool_run.worker.variables.values.unkept import has_graph

_INLINE_BYTES = 16 << 10
"""Larger tensors and arrays have a copy of their own, which later snapshots use until they change."""


class DataWriter:
    """Writes the tensors and arrays of values, and counts the bytes of each value."""

    def __init__(
        self,
        copies: TensorCopies,
        state: StateTensors | None,
        most_bytes: int,
        shared: SharedMappings | None,
        *,
        is_first: bool,
    ) -> None:
        """Tensors of `state` are written by name. Large ones become `TensorCopy`s out of `copies`. `most_bytes` is the limit on one value.

        What differs in memory of `shared` from when `is_first` was true is not kept.
        """
        self._copies, self._state, self._most_bytes, self._shared = copies, state, most_bytes, shared
        self._is_first = is_first
        self.nbytes = 0
        """Counted of the present value."""

    def begin(self) -> None:
        """Begin another value."""
        self.nbytes = 0

    def count(self, nbytes: int) -> None:
        """Count bytes of the value. Raises `UnkeptDataError` above the limit."""
        self.nbytes += nbytes
        if self.nbytes > self._most_bytes:
            raise UnkeptDataError(f"it is larger than {self._most_bytes >> 20} MiB")

    def tensor(self, value: Tensor) -> Any:
        """Return the node of a tensor. Raises `OpaqueError`."""
        if (of_state := self.kept_elsewhere(value)) is not None:
            return of_state
        if not is_dense(value):
            raise UnkeptDataError(
                f"it is a {type(value).__name__} of {value.dtype} with layout {value.layout} on {value.device}"
            )
        if is_freed(value):
            raise OpaqueError
        self.count(value.nbytes)
        if value.device.type == "cpu" and value.nbytes <= _INLINE_BYTES:
            data = raw_bytes(value.detach().resolve_conj().resolve_neg())
            self._check_shared(value, data)
            node: Any = ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), data]
        else:
            copy = _with_room(self._copies.of_tensor(value))
            self._check_shared(value, copy)
            node = ["large", name_of_device(value.device), copy]
        node += layout_of_tensor(value)
        if has_graph(value):
            return ["graph", node]
        if value.requires_grad or type(value) is nn.Parameter:
            tag = "leaf" if type(value) is Tensor else "parameter"
            gradient = None if value.grad is None else self.tensor(value.grad)
            return [tag, node, gradient, value.requires_grad]
        return node

    def kept_elsewhere(self, value: Tensor) -> list[str] | None:
        """Return the node of a tensor that snapshots have under another name; None for any other. Raises `OpaqueError`."""
        if value.is_meta or self._copies.is_other(value):
            raise OpaqueError
        if (of_state := self.of_state(value)) is not None:
            return of_state
        if self._state is not None and self._state.has_memory_of(value):
            raise UnkeptDataError(MOVED)
        return None

    def of_state(self, value: Tensor) -> list[str] | None:
        """Return the node of a parameter or a tensor of an optimizer's state; None for any other."""
        name = None if self._state is None else self._state.name_of(value)
        return None if name is None else ["state", name]

    def array(self, value: Any) -> Any:
        """Return the node of an array or a scalar of NumPy. Raises `OpaqueError`."""
        if not is_numeric_array(value):
            raise UnkeptDataError(
                f"it is an array of class {type(value).__name__} with elements of class {value.dtype}"
            )
        kind, shape = name_of_dtype(value.dtype), None if is_scalar(value) else list(value.shape)
        if value.nbytes <= _INLINE_BYTES:
            self.count(value.nbytes)
            data = value.tobytes()
            self._check_shared(value, data)
            return ["array", kind, shape, data, *layout_of_array(value)]
        if not value.flags.writeable or (type(value).__name__ != "ndarray" and value.nbytes > self._most_bytes):
            raise OpaqueError  # a file in memory, say
        self.count(value.nbytes)
        copy = _with_room(self._copies.of_array(value))
        self._check_shared(value, copy)
        return ["large array", kind, shape, copy, *layout_of_array(value)]

    def check_view(self, value: Any) -> None:
        """Raise `UnkeptDataError` if other ranks write to the memory of a tensor or an array that is written without its content."""
        self._check(value, "view", lambda: crc32(sample_of(value)))

    def _check_shared(self, value: Any, content: bytes | TensorCopy) -> None:
        """Raise `UnkeptDataError` if other ranks write to the memory of a value with this content."""
        self._check(value, "content", content.digest if isinstance(content, TensorCopy) else partial(crc32, content))

    def _check(self, value: Any, what: str, digest: Callable[[], int]) -> None:
        if self._shared is None or not value.nbytes:
            return
        if self._is_first:
            self._shared.note(value, (what, value.nbytes), digest)
        elif not self._shared.may_be_kept(value, (what, value.nbytes), digest):
            raise UnkeptDataError(SHARED)


def _with_room(copy: TensorCopy | None) -> TensorCopy:
    if copy is None:
        raise UnkeptDataError("all large variables together are larger than 256 MiB")
    return copy
