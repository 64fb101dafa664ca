"""The methods of a process group other than its collectives, as a deadpool group implements them.

torch's C++ code would look for these in the group's backends, and a Python group has none. Names and defaults are those of
torch 2.13 to 2.15; tests/worker/compat/test_torch_names.py finds additions in later versions.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

BACKEND = "deadpool"
HOST_ONLY = object()
"""In place of a library's options, for a group that the script made for CPU tensors only."""


def _refusal(what: str, instead: str = "") -> Callable[..., NoReturn]:
    hint = f"\nCall {instead}." if instead else ""

    def refuse(*_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"a process group of deadpool-run does not support {what}.{hint}")

    return refuse


class GroupApi(dist.ProcessGroup):
    """The base of a group whose collectives torch's own groups carry while it is attached."""

    # The registry rebuilds communicators, for all groups at once.
    supports_reconfigure = False
    get_reconfigure_handle = _refusal("get_reconfigure_handle")
    reconfigure = _refusal("reconfigure")
    # Mapped memory of a peer would be lost with the peer.
    supports_window = False
    new_window = _refusal("new_window")
    # The abort after a loss is not torch's, which ends the process.
    supports_abort_hooks = False
    register_abort_hook = unregister_abort_hook = _refusal("register_abort_hook")
    # The backends know of completion, and they change.
    supports_completion_hooks = False
    # Torch runs these hooks in its dispatcher, which the collectives of a Python group bypass.
    register_pre_hook = register_post_hook = _refusal("register_pre_hook and register_post_hook")
    unregister_pre_hook = unregister_post_hook = register_pre_hook
    # `torch.distributed.split_group` is patched instead.
    split_group = splitGroup = _refusal(  # noqa: N815 - torch's name
        "ProcessGroup.split_group", "torch.distributed.split_group or torch.distributed.new_group"
    )
    # The other world belongs to another job.
    merge_remote_group = mergeRemoteGroup = _refusal("merge_remote_group")  # noqa: N815

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors the group communicates."""
        return [
            torch.device("cpu"),
            *([torch.device("cuda")] if torch.cuda.is_available() and self.has_device() else []),
        ]

    def has_device(self) -> bool:
        """Return whether the group may get tensors of the device: not if the script made it for CPU tensors only."""
        return True

    def runs_on(self, _device: torch.device) -> bool:
        """Return whether the group's collectives on tensors of this device run on the device, and not on the host."""
        return False

    def carriers(self) -> list[Any]:
        """Return torch's own groups that carry the collectives now."""
        return []

    def own_device(self) -> torch.device:
        """Return the device on which the library's own collectives over the group run."""
        return torch.device("cpu")

    def results_hold(self) -> bool:
        """Return whether results are real or fake, as far as is known: an abort on a device leaves anything."""
        return True

    def get_backend(self, device: torch.device) -> Any:
        """Return the backend of a device, as `_get_backend` does."""
        return self._get_backend(device)

    def name(self) -> str:
        """Return the name of the backend that carries the tensors, as `torch.distributed.get_backend` does."""
        on_device = torch.cuda.is_available() and self.has_device()
        return str(dist.Backend.NCCL if on_device else dist.Backend.GLOO)

    _get_backend_name = name

    def getBackendName(self) -> str:  # noqa: N802 - torch's C++ name
        """Return our own name: DDP's logger would ask a backend "gloo" for its threads, and the group has none."""
        return BACKEND

    def _add_ephemeral_timeout(self, timeout: timedelta) -> None:
        """Extend the timeout of the next collectives. Torch 2.14 and later call this."""
        for each in self.carriers():
            each._add_ephemeral_timeout(timeout)  # noqa: SLF001
