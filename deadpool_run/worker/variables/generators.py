"""Generators of random numbers in variables: their states, and objects that have these states."""

import random
from collections.abc import Callable
from typing import Any

import torch

from deadpool_run.worker.codec import raw_bytes


def state_of(value: Any) -> tuple[str, Any] | None:
    """Return the kind of a generator, and its state as plain values or bytes; None if it is none that is kept."""
    kind = type(value)
    if kind is random.Random:
        return "random", value.getstate()
    if kind is torch.Generator and value.device.type == "cpu":
        return "generator", raw_bytes(value.get_state())
    if kind.__module__ == "numpy.random._generator" and hasattr(value, "bit_generator"):
        return "numpy", value.bit_generator.state
    if kind.__module__ == "numpy.random.mtrand" and hasattr(value, "get_state"):
        return "mtrand", value.get_state(legacy=False)
    return None


def _random(state: Any, into: Any) -> random.Random:
    found: random.Random = into if type(into) is random.Random else random.Random()  # noqa: S311 - the script's own
    found.setstate(state)
    return found


def _torch_generator(state: bytes, into: Any) -> torch.Generator:
    found: torch.Generator = into if type(into) is torch.Generator else torch.Generator()
    return found.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _numpy_generator(state: Any, into: Any) -> Any:
    import numpy as np  # noqa: PLC0415 - only a state that has one needs numpy

    kind = getattr(np.random, state["bit_generator"])
    found = (
        into if type(into) is np.random.Generator and type(into.bit_generator) is kind else np.random.Generator(kind())
    )
    found.bit_generator.state = state
    return found


def _numpy_old_generator(state: Any, into: Any) -> Any:
    import numpy as np  # noqa: PLC0415 - only a state that has one needs numpy

    found = into if type(into) is np.random.RandomState else np.random.RandomState()
    found.set_state(state)
    return found


MAKERS: dict[str, Callable[..., Any]] = {
    "random": _random,
    "generator": _torch_generator,
    "numpy": _numpy_generator,
    "mtrand": _numpy_old_generator,
}
"""By kind: what sets a generator of the script's to a state, or makes one that has it."""
