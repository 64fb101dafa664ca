"""Private names of torch's modules, tensors, optimizers and loaders: one function for each fact.

Functions that run for each tensor at the end of each step are `attrgetter`s, which cost what the attribute costs.
"""

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed import device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils.data import DataLoader

parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
"""Return a module's own parameters, as the table that it keeps."""
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
"""Return a module's own buffers, as the table that it keeps: the only place of one that is None."""
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")
"""Return a module's children, as the table that it keeps."""
writes_of: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor has been written in place."""
copy_all = torch._foreach_copy_
"""Copy each of some tensors into another, in one call."""
is_wrapper = is_traceable_wrapper_subclass
"""Whether a tensor consists of others."""
tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten


class DispatchMode(TorchDispatchMode):
    """The base of what sees every operator that runs, by its `__torch_dispatch__`."""


_HOOKS = (
    ("torch.nn.modules.module", "_global_buffer_registration_hooks"),
    ("torch.nn.modules.module", "_global_module_registration_hooks"),
    ("torch.nn.modules.module", "_global_parameter_registration_hooks"),
    ("torch.nn.modules.module", "_global_backward_pre_hooks"),
    ("torch.nn.modules.module", "_global_backward_hooks"),
    ("torch.nn.modules.module", "_global_forward_pre_hooks"),
    ("torch.nn.modules.module", "_global_forward_hooks"),
    ("torch.nn.modules.module", "_global_forward_hooks_always_called"),
    ("torch.nn.modules.module", "_global_forward_hooks_with_kwargs"),
    ("torch.optim.optimizer", "_global_optimizer_pre_hooks"),
    ("torch.optim.optimizer", "_global_optimizer_post_hooks"),
)


def local(tensor: Tensor) -> Tensor:
    """Return what this rank holds of `tensor`: of a DTensor its shard, of any other itself."""
    # Not to_local(): for a parameter that makes a new view on each call, so that its identity would say nothing.
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # noqa: SLF001


def inside_compiled(module: nn.Module) -> Any:
    """Return the module that `torch.compile` wrapped; None of any other."""
    # It is known by its attribute: importing its class would take a second.
    return getattr(module, "_orig_mod", None)


def comm_hooks(ddp: DistributedDataParallel) -> list[tuple[Any, Any]]:
    """Return the communication hooks of a DDP, each with its state, in the order of their registration."""
    return list(ddp._comm_hooks)  # noqa: SLF001


def has_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether DDP has decided its buckets."""
    return ddp._has_rebuilt_buckets  # noqa: SLF001


def decide_buckets(ddp: DistributedDataParallel) -> bool:
    """Have DDP decide its buckets, as its next forward would; return whether it has. A collective of its group."""
    ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()  # noqa: SLF001
    return ddp._has_rebuilt_buckets  # noqa: SLF001


def note_all_gradients(ddp: DistributedDataParallel) -> None:
    """Have DDP's reducer take all gradients for made, so that it can decide its buckets."""
    ddp.reducer._push_all_rebuilt_params()  # noqa: SLF001


def forget_unscaled(scaler: GradScaler) -> None:
    """Have the scaler forget of which optimizers it has unscaled the gradients; a disabled one notes nothing."""
    getattr(scaler, "_per_optimizer_states", {}).clear()


def has_workers(loader: Any) -> bool:
    """Whether a DataLoader has persistent workers already."""
    return getattr(loader, "_iterator", None) is not None


def dismiss_workers(loader: DataLoader[Any]) -> None:
    """Let a DataLoader's persistent workers go; torch offers no other way."""
    loader._iterator = None  # noqa: SLF001


def global_hooks() -> list[tuple[tuple[str, str], dict[int, Any]]]:
    """Return the tables of the hooks on every module or optimizer, each with its place in torch."""
    return [(place, getattr(importlib.import_module(place[0]), place[1])) for place in _HOOKS]


def forget_meshes() -> None:
    """Forget the device meshes in use, and what DTensor has worked out for meshes: it names them."""
    device_mesh._mesh_resources.mesh_stack.clear()  # noqa: SLF001
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # noqa: SLF001
    torch._C._clear_DTensor_sharding_propagator_cache()  # noqa: SLF001
