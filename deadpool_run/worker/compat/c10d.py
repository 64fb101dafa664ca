"""Private names of `torch.distributed`: groups, backends and stores.

Only the modules of this folder use private names of torch, or read its version: torch 2.13 to 2.15.
tests/worker/compat/test_torch_names.py checks each name in the files of every version.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as native
from torch._C._distributed_c10d import ProcessGroup, Store, TCPStore
from torch.distributed import distributed_c10d

from deadpool_run.worker import dns

STORE_TIMEOUT = timedelta(minutes=5)
"""Torch's own default, for connecting to a store and for requests to it."""

_PASSING_ON = frozenset(
    {
        *("torch._ops", "torch.autograd.function", "torch.utils._contextlib"),
        *("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"),
        *("torch.distributed._functional_collectives", "torch.distributed.nn.functional"),
    }
)


def gloo_options(device: Any, *, threads: int, timeout: timedelta) -> Any:
    """Return Gloo's options, which have no public name and are the only way to set Gloo's device."""
    options: Any = native.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices = [device]  # noqa: SLF001
    options._threads = threads  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return options


def plain_group(store: Store, rank: int, size: int, gloo: Any) -> ProcessGroup:
    """Return torch's own ProcessGroup over a Gloo backend."""
    group = bare_group(store, rank, size)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)  # noqa: SLF001
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)  # noqa: SLF001
    return group


def bare_group(store: Store, rank: int, size: int) -> ProcessGroup:
    """Return torch's own ProcessGroup without a backend."""
    return ProcessGroup(store, rank, size)


def backend_of(group: ProcessGroup, device: torch.device) -> Any:
    """Return the group's backend for tensors of the device."""
    return group._get_backend(device)  # noqa: SLF001


def start_coalescing(group: ProcessGroup, device: torch.device) -> None:
    """Start to collect the group's operations."""
    group._start_coalescing(device)  # noqa: SLF001


def end_coalescing(group: ProcessGroup, device: torch.device) -> Any:
    """Issue the collected operations as one work."""
    return group._end_coalescing(device)  # noqa: SLF001


def coalescing(group: ProcessGroup | None, device: torch.device, *, async_ops: bool = False) -> Any:
    """Return torch's context manager, within which the group's operations are collected. FSDP uses it."""
    return distributed_c10d._coalescing_manager(group, device, async_ops=async_ops)  # noqa: SLF001


def forget_coalescing(group: ProcessGroup) -> None:
    """Forget a coalescing that an exception has ended: torch would collect the group's later collectives, and never issue them."""
    distributed_c10d._world.pg_coalesce_state.pop(group, None)  # noqa: SLF001


def group_count() -> int:
    """Return the number from which torch makes the name of the next group."""
    return int(distributed_c10d._world.group_count)  # noqa: SLF001


def set_group_count(count: int) -> None:
    """Have the next group take its name from this number, or from the first later one that is free."""
    names = map(str, distributed_c10d._world.pg_names.values())  # noqa: SLF001
    distributed_c10d._world.group_count = max([count, *(int(name) + 1 for name in names if name.isdecimal())])  # noqa: SLF001


def asynchronous(barrier: Any) -> Any:
    """Return the options of a barrier for which the caller waits itself."""
    options = type(barrier)()
    options.device_ids, options.device, options.timeout = barrier.device_ids, barrier.device, barrier.timeout
    options.asyncOp = True
    return options


def open_store(host: str, port: int, timeout: timedelta = STORE_TIMEOUT) -> Store:
    """Connect to a store within `timeout`. Raises torch's `DistError`."""
    with dns.short_timeout():
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store.set_timeout(STORE_TIMEOUT)
    return store


def serve_store(listener: int, port: int, timeout: timedelta) -> Store:
    """Return a store of this process's own on a listening socket. It is served as long as the object lives."""
    with dns.short_timeout():
        return TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener
        )


def clone_store(store: Store) -> Store:
    """Return another connection to the same store: a blocked call on one does not block the other."""
    any_store: Any = store
    with dns.short_timeout():
        cloned: Store = any_store.clone()
    return cloned


def get_all(store: Store, keys: list[str]) -> list[bytes]:
    """Return the values of keys that exist."""
    any_store: Any = store
    return list(any_store.multi_get(keys))


def in_backward() -> bool:
    """Return whether this thread is in a backward pass, which an exception would leave half-way."""
    return bool(torch._C._current_graph_task_id() != -1)  # noqa: SLF001


def passes_on(module: str) -> bool:
    """Return whether a module of torch only passes the collectives of its callers on to a group."""
    return module in _PASSING_ON


def is_capturing() -> bool:
    """Return whether this thread captures a CUDA graph, in which the host cannot wait."""
    return bool(torch.cuda.is_current_stream_capturing())


def fake_backend(rank: int, size: int) -> Any:
    """Return torch's fake backend, for code that asks a group for its backend."""
    return native.FakeProcessGroup._create_internal(rank, size)  # noqa: SLF001


def alone(backend: str, timeout: timedelta | None) -> None:
    """Make a world of one: this process."""
    dist.init_process_group(backend, store=native.HashStore(), rank=0, world_size=1, timeout=timeout)
