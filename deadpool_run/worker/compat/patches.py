"""Patches of torch.distributed where it does not go through a group's methods; other groups are not affected.

Each function gets torch's own first, then the arguments of the call.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from deadpool_run.ids import PACKAGE
from deadpool_run.worker.compat.group_api import BACKEND, HOST_ONLY, GroupApi

_INNER_BACKENDS = frozenset({"gloo", "nccl", "nccl2", "nccl-legacy", "nccl-lazy"})
_initialized: WeakSet[Any] = WeakSet()
"""The default group of `deadpool_run.init()`, while it exists."""


def patch() -> None:
    """Patch torch.distributed, once in a process."""
    _patch(_PATCHES)
    skip_our_frames()


def ignore_second_init() -> None:
    """Let `init_process_group` do nothing while the present default group exists: libraries call it for the script."""
    _initialized.clear()
    _initialized.add(dist.GroupMember.WORLD)
    _patch_init()


@functools.cache
def _patch_init() -> None:
    _patch({"init_process_group": _init_process_group})


def _patch(patches: Mapping[str, Callable[..., Any]]) -> None:
    for name, ours in patches.items():
        torch_function = getattr(distributed_c10d, name, None)
        if torch_function is not None:
            replacement = _in_place_of(torch_function, ours)
            setattr(distributed_c10d, name, replacement)
            if getattr(dist, name, None) is torch_function:
                setattr(dist, name, replacement)


@functools.cache
def skip_our_frames() -> None:
    """Exclude our frames from `torch.compile`: compiled code reaches them, in a DDP's reducer, say. Takes milliseconds, once."""
    from torch._dynamo import trace_rules  # noqa: PLC0415 - every optimizer imports it, and the fork server before that

    trace_rules.add(PACKAGE)


def _in_place_of(torch_function: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(torch_function)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return ours(torch_function, *args, **kwargs)

    return replacement


def _init_process_group(torch_init: Any, *args: Any, **kwargs: Any) -> None:
    if dist.GroupMember.WORLD not in _initialized:
        torch_init(*args, **kwargs)


def _is_ours(group: Any) -> bool:
    return isinstance(group, GroupApi)


def _new_group(
    torch_helper: Any, group_size: int, group_rank: int, ranks: list[int], asked: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make groups with the backend gloo or nccl ours too: else a lost peer would hang or break them."""
    kinds = {part.rpartition(":")[2] for part in str(asked).lower().split(",")}
    if kinds <= _INNER_BACKENDS and _is_ours(dist.GroupMember.WORLD):
        asked = dist.Backend(BACKEND)
        if kinds == {"gloo"}:
            kwargs["backend_options"] = HOST_ONLY
    return torch_helper(group_size, group_rank, ranks, asked, *args, **kwargs)


def _store_barrier(torch_barrier: Any, *args: Any, **kwargs: Any) -> None:
    """Skip the barrier of the whole world in `new_group`: a replacement would wait alone. Attaching is our barrier."""
    if not _is_ours(dist.GroupMember.WORLD):
        torch_barrier(*args, **kwargs)


def _monitored_barrier(
    torch_barrier: Any, group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Allow our groups: torch rejects every backend that is not named gloo."""
    chosen: Any = group if group is not None else dist.GroupMember.WORLD
    if _is_ours(chosen):
        chosen.monitored_barrier(timeout, wait_all_ranks)
    else:
        torch_barrier(group, timeout, wait_all_ranks)


def _get_backend(torch_get: Any, group: Any = None) -> Any:
    """Return the name of the carrying backend: scripts use it to learn what is supported (Gloo has no mean of integers)."""
    name, chosen = torch_get(group), group or dist.GroupMember.WORLD
    return chosen.name() if isinstance(chosen, GroupApi) else name


def _flight_recorder(torch_attach: Any, group: Any, *args: Any, **kwargs: Any) -> None:
    """Skip the flight recorder of torch 2.15: our collectives bypass the dispatcher in which it records."""
    if not _is_ours(group):
        torch_attach(group, *args, **kwargs)


def _batch(torch_batch: Any, p2p_op_list: list[Any]) -> list[Any]:
    """Coalesce a batch on a device: torch does so only on a plain ProcessGroup, and NCCL deadlocks on crossing sends without it."""
    first: Any = p2p_op_list[0] if p2p_op_list else None
    group = getattr(first, "group", None) or dist.GroupMember.WORLD
    device = getattr(getattr(first, "tensor", None), "device", None)
    if device is None or not isinstance(group, GroupApi) or not group.runs_on(device):
        return list(torch_batch(p2p_op_list))  # which refuses what is no operation
    distributed_c10d._check_p2p_op_list(p2p_op_list)  # noqa: SLF001
    with distributed_c10d._coalescing_manager(group, device, async_ops=True) as manager:  # noqa: SLF001
        for op in p2p_op_list:
            peer = "group_dst" if op.op is dist.isend else "group_src"
            op.op(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer})
    return list(manager.works)


def _split_group(torch_split: Any, parent_pg: Any = None, split_ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Make a new group of each part: torch splits a group's backends, and our groups have none."""
    parent: Any = parent_pg or dist.GroupMember.WORLD
    parts = [list(part) for part in split_ranks or ()]
    rank = dist.get_rank(parent) if _is_ours(parent) else -1
    if rank < 0 or not parts or not all(_may_be(part, dist.get_world_size(parent)) for part in parts):
        return torch_split(parent_pg, split_ranks, *args, **kwargs)
    asked = inspect.signature(torch_split).bind(parent_pg, split_ranks, *args, **kwargs).arguments
    part = next((part for part in parts if rank in part), None)
    if part is None:
        distributed_c10d._process_group_name(parts[0], use_hashed_name=True)  # noqa: SLF001 - counts a group, as on the other ranks
        return dist.GroupMember.NON_GROUP_MEMBER
    return dist.new_group(
        [dist.get_global_rank(parent, each) for each in part],
        timeout=asked.get("timeout"),
        backend=None if parent.has_device() else dist.Backend.GLOO,
        group_desc=asked.get("group_desc"),
        use_local_synchronization=True,
        sort_ranks=False,
    )


def _may_be(part: list[int], size: int) -> bool:
    return bool(part) and len(set(part)) == len(part) <= size and all(0 <= rank < size for rank in part)


def _tensor_to_object(torch_function: Any, tensor: torch.Tensor, tensor_size: Any, *args: Any, **kwargs: Any) -> Any:
    """Return None for an object of no bytes: no pickle is empty, so it is the fake result of an object collective."""
    if int(tensor_size) == 0:
        return None
    return torch_function(tensor, tensor_size, *args, **kwargs)


_PATCHES: dict[str, Callable[..., Any]] = {
    "_new_process_group_helper": _new_group,
    "_store_based_barrier": _store_barrier,
    "monitored_barrier": _monitored_barrier,
    "batch_isend_irecv": _batch,
    "_maybe_attach_flight_recorder": _flight_recorder,
    "get_backend": _get_backend,
    "_tensor_to_object": _tensor_to_object,
}
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
    _PATCHES["split_group"] = _split_group
