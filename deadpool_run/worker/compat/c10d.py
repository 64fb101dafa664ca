"""Private names of `torch.distributed`: groups, backends, stores, and the patches of torch itself.

Only the modules of this folder use private names of torch, or read its version: torch 2.13 to 2.15.
tests/worker/compat/test_torch_names.py checks each name in the files of every version.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as native
from torch._C._distributed_c10d import ProcessGroup, Store, TCPStore
from torch.distributed import distributed_c10d as c10d

from deadpool_run.worker import dns

STORE_TIMEOUT = timedelta(minutes=5)
"""Torch's own default, for connecting to a store and for requests to it."""
_INNER_BACKENDS = frozenset({"gloo", "nccl"})


def has_method(name: str) -> bool:
    """Return whether this torch's ProcessGroup has the method: single-tensor collectives change names between versions."""
    return hasattr(ProcessGroup, name)


def gloo_options(device: Any, *, threads: int, timeout: timedelta) -> Any:
    """Return Gloo's options, which have no public name and are the only way to set Gloo's device."""
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
    """Register the group's backend for CUDA tensors."""
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl)  # noqa: SLF001


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """Return the group's backend for tensors of the device."""
    return group._get_backend(device)  # noqa: SLF001


def start_coalescing(group: ProcessGroup, device: torch.device) -> None:
    """Start to collect the group's operations."""
    group._start_coalescing(device)  # noqa: SLF001


def end_coalescing(group: ProcessGroup, device: torch.device) -> Any:
    """Issue the collected operations as one work."""
    return group._end_coalescing(device)  # noqa: SLF001


def add_timeout(group: ProcessGroup, timeout: timedelta) -> None:
    """Extend the timeout of the next collectives. Torch 2.14 and later call this."""
    any_group: Any = group
    any_group._add_ephemeral_timeout(timeout)  # noqa: SLF001


def nccl_options(timeout: timedelta) -> Any:
    """Return NCCL's options with a timeout, as in torch's init_process_group."""
    options: Any = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001
    return options


@contextlib.contextmanager
def nccl_group(backend: Any) -> Iterator[None]:
    """Group all NCCL calls inside (ncclGroupStart)."""
    backend._group_start()  # noqa: SLF001
    try:
        yield
    finally:
        backend._group_end()  # noqa: SLF001


def carrier() -> str:
    """Return the name of the backend that carries the tensors of our groups."""
    return dist.Backend.NCCL if torch.cuda.is_available() else dist.Backend.GLOO


def patch(is_ours: Callable[[Any], bool], backend: str) -> None:
    """Patch the parts of torch.distributed that don't go through a group's methods; other groups are not affected."""
    _replace("_new_process_group_helper", lambda torch_helper: _new_group(torch_helper, is_ours, backend))
    _replace("_store_based_barrier", lambda torch_barrier: _store_barrier(torch_barrier, is_ours))
    _replace("monitored_barrier", lambda torch_barrier: _monitored_barrier(torch_barrier, is_ours))
    _replace("batch_isend_irecv", lambda torch_batch: _batch(torch_batch, is_ours))
    if _splits():
        _replace("split_group", lambda torch_split: _split_group(torch_split, is_ours))
    _replace("_maybe_attach_flight_recorder", lambda torch_attach: _flight_recorder(torch_attach, is_ours))
    _replace("get_backend", lambda torch_get: _get_backend(torch_get, is_ours))
    _replace("_tensor_to_object", _tensor_to_object)
    _keep_the_compiler_out()


def _keep_the_compiler_out() -> None:
    """Exclude our frames from `torch.compile`: compiled code reaches them, in a DDP's reducer, say."""
    from torch._dynamo import trace_rules  # noqa: PLC0415 - every optimizer imports it, and the fork server before that

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
    """Make groups with the backend gloo or nccl ours too: else a lost peer would hang or break them."""

    def helper(group_size: int, group_rank: int, ranks: list[int], asked: Any, *args: Any, **kwargs: Any) -> Any:
        kinds = {part.rpartition(":")[2] for part in str(asked).lower().split(",")}
        if kinds <= _INNER_BACKENDS and is_ours(dist.GroupMember.WORLD):
            asked = dist.Backend(backend)
            kwargs["backend_options"] = None
        return torch_helper(group_size, group_rank, ranks, asked, *args, **kwargs)

    return helper


def _store_barrier(torch_barrier: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Skip the barrier of the whole world in `new_group`: a replacement would wait alone. Attaching is our barrier."""

    def barrier(*args: Any, **kwargs: Any) -> None:
        if not is_ours(dist.GroupMember.WORLD):
            torch_barrier(*args, **kwargs)

    return barrier


def _monitored_barrier(torch_barrier: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Allow our groups: torch rejects every backend that is not named gloo."""

    def barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        chosen: Any = group if group is not None else dist.GroupMember.WORLD
        if is_ours(chosen):
            chosen.monitored_barrier(timeout, wait_all_ranks)
        else:
            torch_barrier(group, timeout, wait_all_ranks)

    return barrier


def _get_backend(torch_get: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Return the name of the carrying backend: scripts use it to learn what is supported (Gloo has no mean of integers)."""

    def get_backend(group: Any = None) -> Any:
        name = torch_get(group)
        if not is_ours(group or dist.GroupMember.WORLD):
            return name
        return carrier()

    return get_backend


def _flight_recorder(torch_attach: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Skip the flight recorder of torch 2.15: our collectives bypass the dispatcher in which it records."""

    def attach(group: Any, *args: Any, **kwargs: Any) -> None:
        if not is_ours(group):
            torch_attach(group, *args, **kwargs)

    return attach


def _batch(torch_batch: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Coalesce a batch: torch does so only on a plain ProcessGroup, and NCCL deadlocks on crossing sends without it."""

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


def _splits() -> bool:
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)


def _split_group(torch_split: Any, is_ours: Callable[[Any], bool]) -> Any:
    """Make a new group of each part: torch splits a group's backends, and our groups have none."""

    def split_group(parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        parent: Any = parent_pg or dist.GroupMember.WORLD
        parts = [list(part) for part in split_ranks or ()]
        rank = dist.get_rank(parent) if is_ours(parent) else -1
        if rank < 0 or not parts or not all(_may_be(part, dist.get_world_size(parent)) for part in parts):
            return torch_split(parent_pg, split_ranks, *args, **kwargs)
        asked = inspect.signature(torch_split).bind(parent_pg, split_ranks, *args, **kwargs).arguments
        part = next((part for part in parts if rank in part), None)
        if part is None:
            c10d._process_group_name(parts[0], use_hashed_name=True)  # noqa: SLF001 - counts a group, as on the other ranks
            return dist.GroupMember.NON_GROUP_MEMBER
        return dist.new_group(
            [dist.get_global_rank(parent, each) for each in part],
            timeout=asked.get("timeout"),
            group_desc=asked.get("group_desc"),
            use_local_synchronization=True,
            sort_ranks=False,
        )

    return split_group


def _may_be(part: list[int], size: int) -> bool:
    return bool(part) and len(set(part)) == len(part) <= size and all(0 <= rank < size for rank in part)


def _tensor_to_object(torch_function: Any) -> Any:
    """Return None for an object of no bytes: no pickle is empty, so it is the fake result of an object collective."""

    def to_object(tensor: torch.Tensor, tensor_size: Any, *args: Any, **kwargs: Any) -> Any:
        if int(tensor_size) == 0:
            return None
        return torch_function(tensor, tensor_size, *args, **kwargs)

    return to_object


def serve_store(host: str, port: int, listener_fd: int) -> Store:
    """Return a store that serves on a listening socket until it is freed."""
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener_fd)


def open_store(host: str, port: int, timeout: timedelta = STORE_TIMEOUT) -> Store:
    """Connect to a store within `timeout`. Raises torch's `DistError`."""
    with dns.short_timeout():
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store.set_timeout(STORE_TIMEOUT)
    return store


def clone_store(store: Store) -> Store:
    """Return another connection to the same store: a blocked call on one does not block the other."""
    any_store: Any = store
    with dns.short_timeout():
        cloned: Store = any_store.clone()
    return cloned


def get_all(store: Store, keys: list[str]) -> list[bytes]:
    """Return the values of keys that exist."""
    any_store: Any = store
    if any_store.has_extended_api():
        return list(any_store.multi_get(keys))
    return [store.get(key) for key in keys]


def in_backward() -> bool:
    """Return whether this thread is in a backward pass, which an exception would leave half-way."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def fake_backend(rank: int, size: int) -> Any:
    """Return torch's fake backend, for code that asks a group for its backend."""
    return native.FakeProcessGroup._create_internal(rank, size)  # noqa: SLF001


def alone(backend: str, timeout: timedelta | None) -> None:
    """Make a world of one: this process."""
    dist.init_process_group(backend, store=native.HashStore(), rank=0, world_size=1, timeout=timeout)


def forget_world() -> None:
    """Drop all process groups, which their owner has freed, so that the next world's groups get the same names."""
    if dist.is_initialized():
        dist.destroy_process_group()
