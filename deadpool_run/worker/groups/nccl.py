"""The NCCL backend of a group.

Its works are returned unwrapped: they do not raise on an abort, and a wrapper would lose the stream semantics of their
futures. All communicators of a process are aborted in one NCCL group, because the abort of one can wait for a kernel that
waits for another. Torch's abort takes part in that group only in part.
"""

import os
import threading
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from deadpool_run.worker.compat import c10d
from deadpool_run.worker.groups.connect import GroupSpec

_SETTINGS = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # else the watchdog ends the process when a peer is lost
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else a monitor ends the process while a drain takes its time
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # else a wait raises inside backward
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}

_aborted: list[Any] = []
"""Aborted backends, kept because destroying one may block or crash."""


def available() -> bool:
    """Whether NCCL and a CUDA device are available."""
    return dist.is_nccl_available() and torch.cuda.is_available()


def configure() -> None:
    """Set the environment variables that torch reads when it makes a backend."""
    os.environ.update(_SETTINGS)


def create(store: Store, spec: GroupSpec) -> Any:
    """Return the group's NCCL backend. Its first collective connects the communicator with the peers."""
    options = c10d.nccl_options(spec.timeout)
    options.is_high_priority_stream = False
    options.global_ranks_in_group = list(spec.ranks)
    options.group_name = spec.group
    return dist.ProcessGroupNCCL(store, spec.rank, len(spec.ranks), options)


def abort_all(backends: Sequence[Any]) -> None:
    """Abort the backends together, in a thread."""
    _aborted.extend(backends)
    threading.Thread(target=c10d.abort_nccl, args=(tuple(backends),), name="deadpool-nccl-abort", daemon=True).start()
