"""Which library carries the collectives of CUDA tensors, and what a loss costs with it. Pure; docs/gpu.md says more."""

import re
from collections.abc import Mapping

from deadpool_run.vault.status_page import DeviceLibrary

_PROMISES = {
    DeviceLibrary.NCCL2: "after a loss, aborts wait for no other rank",
    DeviceLibrary.NCCL: "best effort: a rank whose abort is late is replaced too; torch 2.15 has nccl2",
    DeviceLibrary.OTHER: "a test's",
}
_NCCL2_SINCE = (2, 15)


def described(library: DeviceLibrary) -> str:
    """Return the library's name with its promise."""
    return f"{library.name.lower()} ({_PROMISES[library]})"


def expected(torch_version: str, gpus: int, environment: Mapping[str, str]) -> DeviceLibrary:
    """Return the library that a worker would use, without a look into torch. `torch_version` is that of the installed package."""
    numbers = re.match(r"(\d+)\.(\d+)", torch_version)
    if not gpus or numbers is None or "+cpu" in torch_version:
        return DeviceLibrary.NONE
    is_new = tuple(map(int, numbers.groups())) >= _NCCL2_SINCE
    return DeviceLibrary.NCCL2 if is_new and environment.get("TORCH_DIST_USE_NCCL2") != "0" else DeviceLibrary.NCCL
