"""Chooses the library for collectives on this process's device."""

import torch

from deadpool_run.worker.compat import nccl
from deadpool_run.worker.device.backend import DeviceBackend
from deadpool_run.worker.device.nccl import Nccl, Nccl2

_used: DeviceBackend | None = None


def device_backend() -> DeviceBackend | None:
    """Return the library for this process's GPUs, the same at each call; None without a GPU."""
    global _used  # noqa: PLW0603 - one a process
    if _used is None and nccl.has_legacy() and torch.cuda.is_available():
        _used = Nccl2() if nccl.has_reconfigurable() else Nccl()
    return _used


def use(backend: DeviceBackend) -> None:
    """Use this one in groups that are created from now on. For tests: a fake device needs no GPU."""
    global _used  # noqa: PLW0603 - see above
    _used = backend
