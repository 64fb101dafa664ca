"""FSDP2's private names: its state from one step to the next."""

from collections.abc import Iterable
from typing import Any

from torch.distributed.fsdp import FSDPModule


def has_gradients(module: FSDPModule) -> bool:
    """Return whether FSDP2 keeps gradients that are unreduced, or reduced over the shards only."""
    return any(
        group._partial_reduce_output is not None or any(map(_has_gradient, group.fsdp_params))  # noqa: SLF001
        for group in _groups(module)
    )


def drop_gradients(module: FSDPModule) -> None:
    """Drop unreduced gradients. Before torch 2.15, `reset` keeps them, despite its documentation."""
    for group in _groups(module):
        for record in group.fsdp_params:
            own = _unsharded(record)
            if own is not None:
                own.grad = None
            if record.unsharded_accumulated_grad is not None:  # since torch 2.15 it is the one above, and has no setter
                record.unsharded_accumulated_grad = None


def reset(modules: Iterable[FSDPModule]) -> None:
    """Reset FSDP2 to its state before the first forward. Gradients may be lost, those of the shards too.

    An interrupted backward leaves a note that its final callback is queued, and with that the next backward would reduce
    nothing. An evaluation leaves the order of its forwards, by which the next backward prefetches.
    """
    trees = (_state(module)._state_ctx.all_states for module in modules)  # noqa: SLF001 - empty before the first forward
    for root in dict.fromkeys(states[0] for states in trees if states):
        root._modules[0].reset_iter_state()  # noqa: SLF001 - a tree's states are in the order of named_modules()


def _groups(module: FSDPModule) -> list[Any]:
    return list(_state(module)._fsdp_param_groups)  # noqa: SLF001


def _state(module: FSDPModule) -> Any:
    return module._get_fsdp_state()  # noqa: SLF001


def _has_gradient(record: Any) -> bool:
    own = _unsharded(record)
    return record.unsharded_accumulated_grad is not None or (own is not None and own.grad is not None)


def _unsharded(record: Any) -> Any:
    """Return the parameter that autograd uses; None before the first forward."""
    return getattr(record, "_unsharded_param", None)
