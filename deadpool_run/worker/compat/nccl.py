"""Private names of torch's NCCL backends: `ProcessGroupNCCL`, and from torch 2.15 on `ProcessGroupNCCL2`.

`make test-cuda-wheel` checks each of them in an environment with torch's CUDA build; no device is needed for that.
"""

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as native
from torch._C._distributed_c10d import ProcessGroup, Store

SYMMETRIC = (
    *("enable_symm_mem_for_group", "rendezvous", "empty"),
    *("set_backend", "get_mem_pool", "get_mempool_allocator"),
)
"""The functions of `torch.distributed._symmetric_memory` that a script begins with."""
SUCCESS = "SUCCESS"
"""The name of torch's `ErrorType` for a communicator without an error."""


def has_legacy() -> bool:
    """Return whether torch was built with NCCL."""
    return dist.is_nccl_available()


def has_reconfigurable() -> bool:
    """Return whether torch has `ProcessGroupNCCL2` and would use it for "nccl", and whether it can revoke communicators."""
    return hasattr(dist, "ProcessGroupNCCL2") and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"


def debugs_in_detail() -> bool:
    """Return whether TORCH_DISTRIBUTED_DEBUG=DETAIL."""
    return bool(native.get_debug_level() == native.DebugLevel.DETAIL)


def options(user: Any, *, timeout: timedelta, group: str, ranks: Sequence[int]) -> Any:
    """Return new options with the script's `config` and stream priority, and otherwise as torch's init_process_group sets them."""
    made: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=getattr(user, "is_high_priority_stream", False))
    if hasattr(user, "config"):
        made.config = user.config
    made._timeout = timeout  # noqa: SLF001
    made.global_ranks_in_group = list(ranks)
    made.group_name = group
    return made


def legacy(store: Store, rank: int, size: int, made: Any) -> Any:
    """Return a `ProcessGroupNCCL` whose communicator is nonblocking: it can be aborted while it connects, and safely at all."""
    made.config.blocking = 0
    return dist.ProcessGroupNCCL(store, rank, size, made)


def connect_legacy(communicator: Any, place: torch.device) -> None:
    """Connect the communicator with its peers; torch waits for TORCH_NCCL_NONBLOCKING_TIMEOUT seconds."""
    communicator.eager_connect_single_device(place)


def reconfigurable(store: Store, rank: int, size: int, made: Any) -> Any:
    """Return a `ProcessGroupNCCL2` that connects by `reconfigure`, and whose abort is a revoke."""
    made.enable_reconfigure = True
    any_dist: Any = dist
    return any_dist.ProcessGroupNCCL2(store, rank, size, made)


def reconfigure(communicator: Any, handles: list[str], timeout: timedelta) -> None:
    """Connect the communicator with the members that have these handles, in the order of their ranks."""
    asked: Any = native.ReconfigureOptions()  # type: ignore[attr-defined] # torch 2.15
    asked.uuid = 1  # of this communicator: it is used for one epoch, and its store's keys are that epoch's
    asked.handles = handles
    asked.timeout = timeout
    communicator.reconfigure(asked).wait()


def register(group: ProcessGroup, communicator: Any) -> None:
    """Register the communicator for the CUDA tensors of a group that has no other backend."""
    group._set_default_backend(ProcessGroup.BackendType.NCCL)  # noqa: SLF001
    group._register_backend(torch.device("cuda"), ProcessGroup.BackendType.NCCL, communicator)  # noqa: SLF001


def error_of(communicator: Any) -> str:
    """Return the name of the error that NCCL has found by itself; empty if there is none."""
    name = str(communicator.get_error()).rpartition(".")[2]
    return "" if name == SUCCESS else name


def refuse_symmetric_memory(refuse: Callable[..., NoReturn]) -> None:
    """Call `refuse` in place of the functions that map a peer's memory, or allocate for that. FSDP2 allocates as usual then."""
    from torch.distributed import _symmetric_memory  # noqa: PLC0415 - only jobs on GPUs may use it

    for name in SYMMETRIC:
        if hasattr(_symmetric_memory, name):
            setattr(_symmetric_memory, name, refuse)
    for backend in (getattr(dist, name, None) for name in ("ProcessGroupNCCL", "ProcessGroupNCCL2")):
        if backend is not None:
            backend.supports_tensor_alloc = lambda *_: False  # what FSDP2 asks before it allocates there
            backend.allocate_tensor = backend.register_mem_pool = refuse
