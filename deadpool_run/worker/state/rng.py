"""The states of the random number generators that every script uses without making them.

Taking them costs some tens of microseconds, because nothing is converted at that moment; they are packed into bytes on
the copy thread.
"""

import importlib
import random
import sys
from array import array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deadpool_run.worker.codec import raw_bytes

_CURRENT = "current"


@dataclass(frozen=True, slots=True)
class RngStates:
    """Generator states of one moment. `numpy` is None where numpy's global generator is not loaded.

    `cuda` is keyed by device index, but for the current device, which is kept as such: a replacement that takes over the
    rank may sit on another one.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch: Tensor
    cuda: dict[str, Tensor]


def take_rng() -> RngStates:
    """Return copies of the present states."""
    numpy = sys.modules.get("numpy.random")
    return RngStates(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.get_state(legacy=False),
        torch=torch.get_rng_state(),
        cuda=_take_cuda(),
    )


def put_rng(states: RngStates) -> None:
    """Set every generator to `states`. A CUDA device that this process does not have is passed over."""
    random.setstate(states.python)
    if states.numpy is not None:
        importlib.import_module("numpy.random").set_state(states.numpy)
    torch.set_rng_state(states.torch)
    if not states.cuda:
        return
    for key, device in _cuda_keys().items():
        if key in states.cuda:
            torch.cuda.default_generators[device].set_state(states.cuda[key])


def rng_tree(states: RngStates) -> dict[str, Any]:
    """Return the states as a tree whose large parts are byte strings."""
    kind, words, gauss = states.python
    return {
        "python": {"kind": kind, "words": array("I", words).tobytes(), "gauss": gauss},
        "numpy": states.numpy,
        "torch": raw_bytes(states.torch),
        "cuda": {key: raw_bytes(state) for key, state in states.cuda.items()},
    }


def rng_states(tree: dict[str, Any]) -> RngStates:
    """Return the states of a tree that `rng_tree` made."""
    python = tree["python"]
    return RngStates(
        python=(python["kind"], tuple(array("I", python["words"])), python["gauss"]),
        numpy=tree["numpy"],
        torch=_bytes_tensor(tree["torch"]),
        cuda={key: _bytes_tensor(state) for key, state in tree["cuda"].items()},
    )


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _take_cuda() -> dict[str, Tensor]:
    if not torch.cuda.is_initialized():
        return {}
    return {key: torch.cuda.default_generators[device].get_state() for key, device in _cuda_keys().items()}


def _cuda_keys() -> dict[str, int]:
    """Return under which key each device's state is kept."""
    current = torch.cuda.current_device()
    return {_CURRENT if device == current else str(device): device for device in range(torch.cuda.device_count())}
