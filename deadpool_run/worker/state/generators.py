"""Random number generators in variables: their states, and generators with a given state."""

import random
from typing import Any

import torch

from deadpool_run.worker.codec import raw_bytes, tensor_of


def kind_of(value: Any) -> str:
    """Return the kind of a generator; empty for other objects, which are not kept."""
    kind = type(value)
    if kind is random.Random:
        return "random"
    if kind is torch.Generator and value.device.type == "cpu":
        return "generator"
    if kind.__module__ == "numpy.random._generator" and hasattr(value, "bit_generator"):
        return "numpy"
    return "mtrand" if kind.__module__ == "numpy.random.mtrand" and hasattr(value, "get_state") else ""


def state_of(value: Any) -> Any:
    """Return the state of a generator as plain values or bytes."""
    match kind_of(value):
        case "random":
            return value.getstate()
        case "generator":
            return raw_bytes(value.get_state())
        case "numpy":
            return value.bit_generator.state
    return value.get_state(legacy=False)


KINDS = frozenset({"random", "generator", "numpy", "mtrand"})


def with_state(kind: str, state: Any, into: Any) -> Any:
    """Return a generator of this kind with this state: `into`, if it is of this kind."""
    found: Any
    if kind == "random":
        found = into if type(into) is random.Random else random.Random()  # noqa: S311 - the script's own
        found.setstate(state)
        return found
    if kind == "generator":
        found = into if type(into) is torch.Generator else torch.Generator()
        return found.set_state(tensor_of(state))
    import numpy as np  # noqa: PLC0415 - only states of its generators need numpy

    if kind == "mtrand":
        found = into if type(into) is np.random.RandomState else np.random.RandomState()
        found.set_state(state)
        return found
    bits = getattr(np.random, state["bit_generator"])
    is_alike = type(into) is np.random.Generator and type(into.bit_generator) is bits
    found = into if is_alike else np.random.Generator(bits())
    found.bit_generator.state = state
    return found
