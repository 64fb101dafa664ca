"""Random number generators in variables: their states, and generators with a given state."""

import random
from typing import Any

import torch

from deadpool_run.worker.codec import raw_bytes, tensor_of


def state_of(value: Any) -> tuple[str, Any] | None:
    """Return the kind of a generator, and its state as plain values or bytes; None for other objects, which are not kept."""
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
