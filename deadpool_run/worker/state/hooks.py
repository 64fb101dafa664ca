"""The state of DDP's communication hooks, such as PowerSGD's errors and projections."""

import sys
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from deadpool_run.worker.codec import attributes_of, copied, has_state

_GENERATOR = "numpy.random.RandomState"


def take_hook(state: Any) -> Any:
    """Return a copy of a hook's state; None if it has none, or is of an unknown kind."""
    if not is_stateful(state):
        return None
    if has_state(state):
        return copied(state.state_dict())
    return {name: _taken(value) for name, value in _attributes(state)}


def put_hook(state: Any, values: Any) -> None:
    """Set what `take_hook` returned."""
    if values is None:
        return
    if has_state(state):
        state.load_state_dict(copied(values))
        return
    for name, value in values.items():
        if isinstance(value, dict) and set(value) == {_GENERATOR}:
            getattr(state, name).set_state(value[_GENERATOR])
        else:
            setattr(state, name, copied(value))


def is_stateful(state: Any) -> bool:
    """Return whether a hook's state is of a kind that can be copied."""
    return has_state(state) or type(state).__module__.startswith("torch.distributed.algorithms.")


def is_unknown(state: Any) -> bool:
    """Return whether a hook may have state that cannot be copied."""
    return state is not None and not isinstance(state, dist.ProcessGroup) and not is_stateful(state)


def _attributes(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes, without process groups and functions."""
    for name, value in attributes_of(state).items():
        if not isinstance(value, dist.ProcessGroup) and not callable(value):
            yield name, value


def _taken(value: Any) -> Any:
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and isinstance(value, numpy.RandomState):
        return {_GENERATOR: value.get_state(legacy=False)}
    return copied(value)
