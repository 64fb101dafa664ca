"""The states of the global random number generators, as trees of plain values.

The keys are `python`, `numpy` (None if numpy.random is not loaded), `torch` and `cuda`. The states in `cuda` are keyed by
device index, except the current device, whose key is `current`: a replacement may use another device.
"""

import importlib
import random
import sys
from array import array
from typing import Any

import torch

from deadpool_run.worker.codec import raw_bytes, tensor_of

RngStates = dict[str, Any]


def take_rng() -> RngStates:
    """Return copies of the present states. Takes some tens of microseconds."""
    kind, words, gauss = random.getstate()
    numpy = sys.modules.get("numpy.random")
    cuda = _cuda_keys() if torch.cuda.is_initialized() else {}
    return {
        "python": {"kind": kind, "words": array("I", words).tobytes(), "gauss": gauss},
        "numpy": None if numpy is None else numpy.get_state(legacy=False),
        "torch": raw_bytes(torch.get_rng_state()),
        "cuda": {key: raw_bytes(torch.cuda.default_generators[device].get_state()) for key, device in cuda.items()},
    }


def put_rng(states: RngStates) -> None:
    """Set every generator. CUDA devices that this process does not have are skipped."""
    python = states["python"]
    random.setstate((python["kind"], tuple(array("I", python["words"])), python["gauss"]))
    if states["numpy"] is not None:
        importlib.import_module("numpy.random").set_state(states["numpy"])
    torch.set_rng_state(tensor_of(states["torch"]))
    if not states["cuda"]:
        return
    for key, device in _cuda_keys().items():
        if key in states["cuda"]:
            torch.cuda.default_generators[device].set_state(tensor_of(states["cuda"][key]))


def seed_global(drawn: bytes) -> None:
    """Seed the generators of a process without a device, such as a loader's worker, from random bytes."""
    torch.manual_seed(int.from_bytes(drawn[:7], "little"))
    random.seed(drawn)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(list(drawn))


def _cuda_keys() -> dict[str, int]:
    current = torch.cuda.current_device()
    return {"current" if device == current else str(device): device for device in range(torch.cuda.device_count())}


class GeneratorState:
    """A script's own random generator with the interface of a protected object."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state."""
        return {"state": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the generator's state."""
        self._generator.set_state(state["state"].cpu())
