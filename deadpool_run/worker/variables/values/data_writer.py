"""Encoder of tensors and arrays, small ones inline and large ones as copies. See `writer`."""

from typing import Any

from torch import Tensor, nn

from deadpool_run.worker.codec import name_of_device, name_of_dtype, raw_bytes
from deadpool_run.worker.compat.modules import is_dense
from deadpool_run.worker.state.state_tensors import StateTensors
from deadpool_run.worker.variables.values.layouts import layout_of_array, layout_of_tensor
from deadpool_run.worker.variables.values.objects import OpaqueError, UnkeptDataError
from deadpool_run.worker.variables.values.tensors import TensorCopies, TensorCopy, is_freed, is_numeric_array
from deadpool_run.worker.variables.values.unkept import MOVED, has_graph

_INLINE_BYTES = 16 << 10
"""Larger tensors and arrays have a copy of their own, which later snapshots use until they change."""


class DataWriter:
    """Writes the tensors and arrays of values, and counts the bytes of each value."""

    def __init__(self, copies: TensorCopies, state: StateTensors | None, most_bytes: int) -> None:
        """Tensors of `state` are written by name. Large ones become `TensorCopy`s out of `copies`. `most_bytes` is the limit on one value."""
        self._copies, self._state, self._most_bytes = copies, state, most_bytes
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
        if value.is_meta or self._copies.is_other(value):
            raise OpaqueError
        if (of_state := self.of_state(value)) is not None:
            return of_state
        if self._state is not None and self._state.has_memory_of(value):
            raise UnkeptDataError(MOVED)
        if type(value) not in (Tensor, nn.Parameter) or not is_dense(value):
            raise UnkeptDataError(f"it is a {type(value).__name__} of layout {value.layout} on {value.device}")
        if is_freed(value):
            raise OpaqueError
        self.count(value.nbytes)
        if value.device.type == "cpu" and value.nbytes <= _INLINE_BYTES:
            plain = value.detach().resolve_conj().resolve_neg()
            node: Any = ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), raw_bytes(plain)]
        else:
            node = ["large", name_of_device(value.device), _with_room(self._copies.of_tensor(value))]
        node += layout_of_tensor(value)
        if has_graph(value):
            return ["graph", node]
        if value.requires_grad or type(value) is nn.Parameter:
            tag = "leaf" if type(value) is Tensor else "parameter"
            gradient = None if value.grad is None else self.tensor(value.grad)
            return [tag, node, gradient, value.requires_grad]
        return node

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
        kind, shape = name_of_dtype(value.dtype), list(value.shape) if value.ndim else None
        if value.nbytes <= _INLINE_BYTES:
            self.count(value.nbytes)
            return ["array", kind, shape, value.tobytes(), *layout_of_array(value)]
        if not value.flags.writeable or (type(value).__name__ != "ndarray" and value.nbytes > self._most_bytes):
            raise OpaqueError  # a file in memory, say
        self.count(value.nbytes)
        return ["large array", kind, shape, _with_room(self._copies.of_array(value)), *layout_of_array(value)]


def _with_room(copy: TensorCopy | None) -> TensorCopy:
    if copy is None:
        raise UnkeptDataError("all large variables together are larger than 256 MiB")
    return copy
