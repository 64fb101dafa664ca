"""Private names of torch's modules, tensors, optimizers and loaders.

Functions that run for each tensor at the end of each step are `attrgetter`s, which are as cheap as the attribute.
"""

import importlib
import inspect
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from deadpool_run.ids import is_of_package

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""Return the table of a module's own parameters."""
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""Return the table of a module's own buffers, with those that are None."""
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Return the table of a module's children."""
has_buckets: Callable[[DistributedDataParallel], bool] = attrgetter("_has_rebuilt_buckets")
"""Return whether DDP has decided its buckets."""
writes_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor has been written in place."""
is_view: Callable[[Tensor], bool] = torch.Tensor._is_view  # noqa: SLF001
"""Return whether a tensor is a view of another one."""
seen_through: Callable[[Tensor], Tensor | None] = attrgetter("_base")
"""Return the tensor of which another one is a view; None for one that is no view."""
negated: Callable[[Tensor], Tensor] = torch._neg_view  # noqa: SLF001
"""Return a view of a tensor with the negative values, which are computed when they are used."""
copy_all = torch._foreach_copy_
"""Copy a list of tensors into another one, in one call."""
is_wrapper = is_traceable_wrapper_subclass
"""Return whether a tensor consists of other tensors."""
tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten
DispatchMode = TorchDispatchMode
"""The base class of modes that intercept every operator in `__torch_dispatch__`."""

PLAIN_TENSORS = (Tensor, nn.Parameter)
"""Classes of tensors that have memory of their own."""
_NAMES_INSIDE: dict[type, str | None] = {}
"""By class of tensors, what `name_inside` returns. Looked up once, because flattening may wait for a device."""
_HOOKS = {
    "torch.nn.modules.module": (
        "_global_buffer_registration_hooks",
        "_global_module_registration_hooks",
        "_global_parameter_registration_hooks",
        "_global_backward_pre_hooks",
        "_global_backward_hooks",
        "_global_forward_pre_hooks",
        "_global_forward_hooks",
        "_global_forward_hooks_always_called",
        "_global_forward_hooks_with_kwargs",
    ),
    "torch.optim.optimizer": ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
}


def shard_of(tensor: Tensor) -> Tensor:
    """Return a DTensor's shard on this rank; any other tensor as it is."""
    # Not to_local(): for a parameter that makes a new view on each call, with another identity.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001


def local(tensor: Tensor) -> Tensor:
    """Return the plain tensor of this rank: a DTensor's shard, and what a library's class has around it."""
    own = shard_of(tensor)
    if type(own) in PLAIN_TENSORS or (name := name_inside(own)) is None:
        return own
    found: Tensor = getattr(own, name)
    return found


def name_inside(own: Tensor) -> str | None:
    """Return the attribute with the plain tensor that another one is a class around; None for any other tensor.

    That is the only part with the shape and dtype of the whole. torchao's float8 parameters are such: beside the tensor they have the
    scale of its values, or None.
    """
    kind = type(own)
    if kind not in _NAMES_INSIDE:
        _NAMES_INSIDE[kind] = _find_inside(own)
    return _NAMES_INSIDE[kind]


def _find_inside(own: Tensor) -> str | None:
    wrapper: Any = own
    if type(own).__module__.partition(".")[0] == "torch" or not is_wrapper(wrapper):
        return None
    parts = {name: getattr(own, name) for name in wrapper.__tensor_flatten__()[0]}
    alike = [
        name
        for name, part in parts.items()
        if type(part) in PLAIN_TENSORS and (part.shape, part.dtype) == (own.shape, own.dtype)
    ]
    return alike[0] if len(alike) == 1 else None


def is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain one in the memory of a CPU or of a CUDA device."""
    plain = type(tensor) in PLAIN_TENSORS and (tensor.is_cpu or tensor.is_cuda)
    return plain and tensor.layout is torch.strided and not tensor.is_quantized


def address_of(tensor: Tensor | None) -> int:
    """Return where the memory of a tensor begins; 0 if there is none, or if the tensor is not dense."""
    if tensor is None:
        return 0
    own = tensor if type(tensor) in PLAIN_TENSORS else local(tensor)
    return own.untyped_storage().data_ptr() if is_dense(own) else 0


def inside_compiled(module: nn.Module) -> Any:
    """Return the module inside a `torch.compile` wrapper; None for other modules."""
    # By its attribute, because importing the class takes a second.
    return getattr(module, "_orig_mod", None)


def hook_states(ddp: DistributedDataParallel) -> list[Any]:
    """Return the states of a DDP's communication hooks, in the order of registration."""
    return [state for _, state in ddp._comm_hooks]  # noqa: SLF001


def comm_hooks(ddp: DistributedDataParallel) -> list[Any]:
    """Return a DDP's communication hooks, in the order of registration."""
    return [hook for hook, _ in ddp._comm_hooks]  # noqa: SLF001


def decide_buckets(ddp: DistributedDataParallel) -> bool:
    """Have DDP decide its buckets, as its next forward would; return whether it did. Collective of its group."""
    ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()  # noqa: SLF001
    return ddp._has_rebuilt_buckets  # noqa: SLF001


def is_deciding_buckets() -> bool:
    """Return whether this thread is in a collective by which DDP's C++ code agrees on its buckets. Slow: it looks at the stack."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        if code is decide_buckets.__code__:
            return True
        if not is_of_package(frame.f_globals.get("__name__", "")):  # the caller of the C++ code
            in_ddp = code.co_filename == DistributedDataParallel.forward.__code__.co_filename
            return in_ddp and any(name in code.co_name for name in ("_pre_forward", "main_hook"))
        frame = frame.f_back
    return False


def hooks_of_tensor(tensor: Tensor) -> dict[str, Any]:
    """Return the tables of a tensor's hooks, by attribute; None where it has none."""
    return {
        "_backward_hooks": tensor._backward_hooks,  # noqa: SLF001
        "_post_accumulate_grad_hooks": tensor._post_accumulate_grad_hooks,  # noqa: SLF001
    }


def forget_reduction(ddp: DistributedDataParallel) -> None:
    """Have DDP forget the gradients of an interrupted backward, from which it would decide its buckets."""
    ddp.reducer._reset_state()  # noqa: SLF001


def note_all_gradients(ddp: DistributedDataParallel) -> None:
    """Mark all gradients as ready in DDP's reducer, so that it can decide its buckets."""
    ddp.reducer._push_all_rebuilt_params()  # noqa: SLF001


def global_hooks() -> list[dict[int, Any]]:
    """Return the tables of global module and optimizer hooks, always in the same order."""
    return [getattr(importlib.import_module(module), name) for module, names in _HOOKS.items() for name in names]


def forget_meshes() -> None:
    """Drop the active device meshes, and DTensor's caches, which refer to meshes."""
    device_mesh._mesh_resources.mesh_stack.clear()  # noqa: SLF001
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # noqa: SLF001
    torch._C._clear_DTensor_sharding_propagator_cache()  # noqa: SLF001
