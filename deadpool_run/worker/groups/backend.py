"""The torch.distributed backend "deadpool": every group that a script creates goes to the installed registry."""

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from deadpool_run.worker.compat import patches
from deadpool_run.worker.compat.group_api import BACKEND
from deadpool_run.worker.groups.group import Group
from deadpool_run.worker.groups.owner import refuse
from deadpool_run.worker.groups.registry import Registry

_current: Registry | None = None


def install(registry: Registry, *, store: Store, prefix: str, attached: bool) -> None:
    """Make `registry` the owner of every group of the backend "deadpool" that is created from now on.

    With `attached`, new groups connect to their peers at once, under store keys that begin with `prefix`. Else they rehearse.
    """
    global _current  # noqa: PLW0603 - torch keeps one creator per backend and process
    first_time = _current is None
    _current = registry
    registry.place(store, prefix, attached=attached)
    if registry.device is not None:
        registry.device.configure()
    if first_time and not hasattr(dist.Backend, BACKEND.upper()):
        patches.patch()
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])


def uninstall(registry: Registry) -> None:
    """Remove the registry, so that another one can be installed.

    Its callbacks are dropped: torch may keep one of the groups for good, and with it the registry.
    """
    global _current  # noqa: PLW0603 - see `install`
    _current = None
    registry.on_failure = lambda _message: None
    registry.refuse = refuse
    registry.hold = lambda: None


def _create(options: Any, library_options: Any) -> Group:
    assert _current is not None
    return _current.create(options, library_options)
