"""The states of the global random number generators.

Taking them costs some tens of microseconds, because only the copy thread converts them to bytes.
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
    """Generator states at one moment. `numpy` is None if numpy.random is not loaded.

    `cuda` is keyed by device index, except the current device, whose key is `current`: a replacement may use another device.
    """

    python: tuple[Any, ...]
    numpy: dict[str, Any] | None
    torch: Tensor
    cuda: dict[str, Tensor]


def take_rng() -> RngStates:
    """Return copies of the present states."""
    numpy = sys.modules.get("numpy.random")
    cuda = _cuda_keys() if torch.cuda.is_initialized() else {}
    return RngStates(
        python=random.getstate(),
        numpy=None if numpy is None else numpy.get_state(legacy=False),
        torch=torch.get_rng_state(),
        cuda={key: torch.cuda.default_generators[device].get_state() for key, device in cuda.items()},
    )


def put_rng(states: RngStates) -> None:
    """Set every generator. CUDA devices that this process does not have are skipped."""
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
    """Return the states as a tree with byte strings for the large parts."""
    kind, words, gauss = states.python
    return {
        "python": {"kind": kind, "words": array("I", words).tobytes(), "gauss": gauss},
        "numpy": states.numpy,
        "torch": raw_bytes(states.torch),
        "cuda": {key: raw_bytes(state) for key, state in states.cuda.items()},
    }


def rng_states(tree: dict[str, Any]) -> RngStates:
    """Return the states of a tree of `rng_tree`."""
    python = tree["python"]
    return RngStates(
        python=(python["kind"], tuple(array("I", python["words"])), python["gauss"]),
        numpy=tree["numpy"],
        torch=_bytes_tensor(tree["torch"]),
        cuda={key: _bytes_tensor(state) for key, state in tree["cuda"].items()},
    )


def _bytes_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _cuda_keys() -> dict[str, int]:
    current = torch.cuda.current_device()
    return {_CURRENT if device == current else str(device): device for device in range(torch.cuda.device_count())}
