"""Everything that depends on torch's version or on its private names, and the few places where torch itself is patched.

Written against torch 2.11 to 2.13.
"""

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as native
from torch._C._distributed_c10d import ProcessGroup, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from deadpool_run.worker import names

STORE_TIMEOUT = timedelta(minutes=5)
"""Torch's own, for connecting to a store and for what is asked of it."""
_INNER_BACKENDS = frozenset({"gloo", "nccl"})
_OF_MESHES = ("mesh_stack", "child_to_root_mapping", "root_to_flatten_mapping", "flatten_name_to_root_dims")
"""What device meshes leave behind, in one version of torch or another."""


def has_method(name: str) -> bool:
    """Whether this torch's ProcessGroup has the method (names of the single-tensor collectives change over versions)."""
    return hasattr(ProcessGroup, name)


def creation_timeout(connect_timeout: timedelta, timeout: timedelta) -> timedelta:
    """Return the time-out to construct a Gloo backend with, so that its collectives end up with `timeout`."""
    return connect_timeout if _timeout_setter() is not None else timeout


def set_timeout(backend: Any, timeout: timedelta) -> None:
    """Set the time-out of a Gloo backend's collectives, sends and receives."""
    name = _timeout_setter()
    if name is not None:
        getattr(backend, name)(timeout)


def _timeout_setter() -> str | None:
    # `_set_default_timeout` is older, but does not reach sends and receives: they wait with their context's time-out.
    return "set_timeout" if hasattr(native.ProcessGroupGloo, "set_timeout") else None


def gloo_options(device: Any, *, threads: int, timeout: timedelta) -> Any:
    """Return Gloo's options; they have no public name, and are the only way to give Gloo a device."""
    options: Any = native.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices = [device]  # noqa: SLF001
    options._threads = threads  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return options


def plain_group(store: Store, rank: int, size: int, gloo: Any) -> ProcessGroup:
    """Return torch's own ProcessGroup over a Gloo backend."""
    group = ProcessGroup(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)  # noqa: SLF001
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)  # noqa: SLF001
    return group


def add_cuda_backend(group: ProcessGroup, nccl: Any) -> None:
    """Let the group answer CUDA tensors too."""
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)  # noqa: SLF001


def patch(is_ours: Callable[[Any], bool], backend: str) -> None:
    """Adapt the parts of torch.distributed that do not go through a group's methods; other groups are not affected."""
    _replace("_new_process_group_helper", lambda torch_helper: _new_group(torch_helper, is_ours, backend))
    _replace("_store_based_barrier", lambda torch_barrier: _store_barrier(torch_barrier, is_ours))
    _replace("monitored_barrier", lambda torch_barrier: _monitored_barrier(torch_barrier, is_ours))
    _replace("batch_isend_irecv", lambda torch_batch: _batch(torch_batch, is_ours))
    _replace("get_backend", lambda torch_get: _get_backend(torch_get, is_ours))
    _replace("_tensor_to_object", _tensor_to_object)
    _keep_the_compiler_out()


def _keep_the_compiler_out() -> None:
    """Have `torch.compile` run our frames as they are: it comes upon them under compiled code, in a DDP's reducer say."""
    from torch._dynamo import trace_rules  # noqa: PLC0415 - imported by every optimizer, and ahead of it by the nursery

    trace_rules.add(__package__.partition(".")[0])


def _replace(name: str, wrap: Callable[[Any], Any]) -> None:
    torch_function = getattr(c10d, name, None)
    if torch_function is None:
        return
    replacement = functools.wraps(torch_function)(wrap(torch_function))
    setattr(c10d, name, replacement)
    if getattr(dist, name, None) is torch_function:
        setattr(dist, name, replacement)


def _new_group(torch_helper: Any, is_ours: Callable[[Any], bool], backend: str) -> Any:
    """Make groups that a script asks of Gloo or NCCL by name ours too, else a lost peer would hang or break them."""

    def helper(group_size: int, group_rank: int, ranks: list[int], asked: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = {part.rpartition(":")[2] for part in str(asked).lower().split(",")}
        if kinds <= _INNER_BACKENDS and is_ours(dist.GroupMember.WORLD):
            asked = dist.Backend(backend)
            kwargs["backend_options"] = None
        return torch_helper(group_size, group_rank, ranks, asked, *args, **kwargs)

    return helper


def _store_barrier(torch_barrier: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Torch ends `new_group` in a barrier of the whole world; a newcomer would wait alone. Attaching is our barrier."""

    def barrier(*args: Any, **kwargs: Any) -> None:
        if not is_ours(dist.GroupMember.WORLD):
            torch_barrier(*args, **kwargs)

    return barrier


def _monitored_barrier(torch_barrier: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Torch refuses every backend that is not named gloo."""

    def barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        chosen: Any = group if group is not None else dist.GroupMember.WORLD
        if is_ours(chosen):
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            torch_barrier(group, timeout, wait_all_ranks)

    return barrier


def _get_backend(torch_get: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Name what carries the tensors: scripts ask this to learn what works (Gloo has no mean of whole numbers)."""

    def get_backend(group: Any = None) -> Any:
        name = torch_get(group)
        if not is_ours(group or dist.GroupMember.WORLD):
            return name
        return dist.Backend.NCCL if torch.cuda.is_available() else dist.Backend.GLOO

    return get_backend


def _batch(torch_batch: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Torch coalesces a batch only on a plain ProcessGroup; NCCL deadlocks on crossing sends that are not coalesced."""

    def batch(p2p_op_list: list[Any]) -> list[Any]:
        first: Any = p2p_op_list[0] if p2p_op_list else None
        group = getattr(first, "group", None) or dist.GroupMember.WORLD
        if not is_ours(group) or not getattr(first, "tensor", torch.empty(0)).is_cuda:
            return list(torch_batch(p2p_op_list))
        c10d._check_p2p_op_list(p2p_op_list)  # noqa: SLF001
        with c10d._coalescing_manager(group, first.tensor.device, async_ops=True) as manager:  # noqa: SLF001
            for op in p2p_op_list:
                peer = "group_dst" if op.op is dist.isend else "group_src"
                op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer})
        return list(manager.works)

    return batch


def _tensor_to_object(torch_function: Any) -> Any:
    """No pickle is empty: an object of no bytes is the fake answer of an object collective, and stands for None."""

    def to_object(tensor: torch.Tensor, tensor_size: Any, *args: Any, **kwargs: Any) -> Any:
        if int(tensor_size) == 0:
            return None
        return torch_function(tensor, tensor_size, *args, **kwargs)

    return to_object


def open_store(host: str, port: int, timeout: timedelta = STORE_TIMEOUT) -> Store:
    """Return a connection to the store that serves there, made within `timeout`. Raises torch's `DistError`."""
    with names.in_a_hurry():
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store.set_timeout(STORE_TIMEOUT)
    return store


def clone_store(store: Store) -> Store:
    """Return another connection to the same store, so that a blocked call on one does not block the other."""
    any_store: Any = store
    with names.in_a_hurry():
        cloned: Store = any_store.clone()
    return cloned


def get_all(store: Store, keys: list[str]) -> list[bytes]:
    """Return the values of keys that exist."""
    any_store: Any = store
    if any_store.has_extended_api():
        return list(any_store.multi_get(keys))
    return [store.get(key) for key in keys]


def fsdp_records(module: Any) -> list[Any]:
    """Return FSDP2's own records of the parameters that a module shards: torch shows them nowhere else."""
    return [record for group in _fsdp_groups(module) for record in group.fsdp_params]


def fsdp_forget(module: Any) -> None:
    """Have FSDP2 forget what it carries from one forward or backward to the next.

    That is the order of the forwards since the last backward, by which it gathers ahead, and sums of gradients that are
    to be reduced over replicas later.
    """
    order = getattr(module._get_fsdp_state()._comm_ctx, "post_forward_order", None)  # noqa: SLF001
    if order is not None:  # else it has not been used yet
        order.clear()
    for group in _fsdp_groups(module):
        group._post_forward_indices.clear()  # noqa: SLF001
        group._partial_reduce_output = None  # noqa: SLF001


def fsdp_holds_back(module: Any) -> bool:
    """Say whether FSDP2 keeps gradients that are reduced in part: over the shards, and not yet over the replicas."""
    return any(getattr(group, "_partial_reduce_output", None) is not None for group in _fsdp_groups(module))


def _fsdp_groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()  # noqa: SLF001
    groups = getattr(state, "_fsdp_param_groups", None)  # before torch 2.13 there was one at most
    return [group for group in (state._fsdp_param_group,) if group is not None] if groups is None else list(groups)  # noqa: SLF001


def in_backward() -> bool:
    """Say whether this thread is in a backward pass: an exception would leave it half-way."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def fake_backend(rank: int, size: int) -> Any:
    """Return torch's backend that communicates with nobody, for code that asks a group for its backend."""
    return native.FakeProcessGroup._create_internal(rank, size)  # noqa: SLF001


def forget_world() -> None:
    """Forget every process group of the process and what was derived from them. Whoever owns them has freed them before.

    The next world's groups get the same names again.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    resources = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    for name in _OF_MESHES:
        kept = getattr(resources, name, None)
        if kept is not None:
            kept.clear()
    tensor = sys.modules.get("torch.distributed.tensor")
    dispatcher = getattr(getattr(tensor, "DTensor", None), "_op_dispatcher", None)
    if dispatcher is not None:  # what was worked out for an old mesh names it
        dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # noqa: SLF001
    if clear is not None:
        clear()
