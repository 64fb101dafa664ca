"""Random number generators in variables: their states, generators with a given state, and seeds in workers of data loaders."""

import hashlib
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import get_worker_info

from deadpool_run.worker.codec import device_of, name_of_device, raw_bytes, table_of, tensor_of
from deadpool_run.worker.state.rng import seed_global

_SEEDS, _CUDA = "seeds", "cuda generator"
_MOST_OBJECTS = 4096
_MOST_PARTS = 256


def kind_of(value: Any) -> str:
    """Return the kind of a generator; empty for other objects, which are not kept."""
    return _kind_of_class(type(value), value)


def kind_inherited(value: Any) -> str:
    """Return the kind of generator whose class an object's class derives from; empty for other objects."""
    return next((kind for each in type(value).__mro__[1:] if (kind := _kind_of_class(each, value))), "")


def _kind_of_class(kind: type, value: Any) -> str:
    if kind is random.Random:
        return "random"
    if kind is torch.Generator:
        return {"cpu": "generator", "cuda": _CUDA}.get(value.device.type, "")
    match kind.__module__:
        case "numpy.random._generator" if hasattr(value, "bit_generator"):
            return "numpy"
        case "numpy.random.bit_generator" if hasattr(value, "spawn_key"):
            return _SEEDS
        case "numpy.random.mtrand" if hasattr(value, "get_state"):
            return "mtrand"
    return ""


def state_of(value: Any, kind: str = "") -> Any:
    """Return the state of a generator as plain values or bytes. `kind` is that of its base class, whose methods are used."""
    match kind or kind_of(value):
        case "random":
            return random.Random.getstate(value)
        case "generator":
            return raw_bytes(torch.Generator.get_state(value))
        case "cuda generator":
            return name_of_device(value.device), raw_bytes(torch.Generator.get_state(value))
        case "numpy":
            bits = value.bit_generator
            seeds: Any = getattr(bits, "seed_seq", None)  # its children are numbered
            return bits.state | ({_SEEDS: seeds.state} if kind_of(seeds) == _SEEDS else {})
        case "seeds":
            return dict(value.state)
    return value.get_state(legacy=False)


KINDS = frozenset({"random", "generator", _CUDA, "numpy", "mtrand", _SEEDS})


def with_state(kind: str, state: Any, into: Any) -> Any:
    """Return a generator of this kind with this state: `into`, if it is of this kind."""
    found = into if kind_of(into) == kind and _fits(kind, state, into) else _made(kind, state)
    set_state(found, state, kind)
    return found


def _fits(kind: str, state: Any, into: Any) -> bool:
    if kind == "numpy":
        return bool(type(into.bit_generator).__name__ == state["bit_generator"])
    return kind != _CUDA or into.device == device_of(state[0])


def set_state(found: Any, state: Any, kind: str) -> None:
    """Set the state of a generator of this kind, or of a class that derives from one."""
    match kind:
        case "random":
            random.Random.setstate(found, state)
        case "generator":
            torch.Generator.set_state(found, tensor_of(state))
        case "cuda generator":
            torch.Generator.set_state(found, tensor_of(state[1]))
        case "numpy":
            found.bit_generator.state = {name: each for name, each in state.items() if name != _SEEDS}
            if _SEEDS in state and kind_of(found.bit_generator.seed_seq) == _SEEDS:
                set_state(found.bit_generator.seed_seq, state[_SEEDS], _SEEDS)
        case "seeds":
            if found.state != state:
                found.__setstate__(_made(kind, state).__reduce__()[2])
        case _:
            found.set_state(state)


def _made(kind: str, state: Any) -> Any:
    """Return a new generator of this kind. NumPy is needed only for its own."""
    if kind == "random":
        return random.Random()  # noqa: S311 - the script's own
    if kind == "generator":
        return torch.Generator()
    if kind == _CUDA:
        return torch.Generator(device_of(state[0]))
    import numpy as np  # noqa: PLC0415 - as above

    if kind == "numpy":
        return np.random.Generator(getattr(np.random, state["bit_generator"])())
    return np.random.SeedSequence(**state) if kind == _SEEDS else np.random.RandomState()


def _seed(generator: Any, drawn: bytes) -> None:
    if isinstance(generator, random.Random):
        generator.seed(drawn)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(int.from_bytes(drawn[:7], "little"))
    elif hasattr(generator, "bit_generator"):
        bits = generator.bit_generator
        bits.state = type(bits)(int.from_bytes(drawn, "little")).state
    else:
        generator.seed(list(drawn))


@dataclass(slots=True)
class SearchResult:
    """The result of a search."""

    generators: list[Any] = field(default_factory=list)
    """In a fixed order."""
    numbers: dict[str, int | float] = field(default_factory=dict)
    """Numbers in attributes, by class and name; the last one of several."""


def search(root: Any) -> SearchResult:
    """Search the attributes of an object, of those inside it, and their lists, tuples and dicts."""
    numpy = sys.modules.get("numpy.random")
    kinds: tuple[Any, ...] = (random.Random, torch.Generator)
    if numpy is not None:
        kinds += (numpy.Generator, numpy.RandomState)
    found = SearchResult()
    seen: set[int] = set()
    waiting = [root]
    while waiting and len(seen) < _MOST_OBJECTS:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)
        if issubclass(kind, kinds):
            if kind is not random.SystemRandom:
                found.generators.append(each)
        elif kind in (list, tuple):
            waiting += each[:_MOST_PARTS]
        elif kind is dict:
            waiting += list(each.values())[:_MOST_PARTS]
        elif hasattr(kind, "__dict__") and not issubclass(kind, (type, torch.Tensor)):
            attributes = table_of(each)
            waiting += attributes.values()
            found.numbers |= {
                f"{kind.__qualname__}.{name}": value
                for name, value in attributes.items()
                if type(value) in (int, float)
            }
    return found


def seed_epoch(base_seed: int, epoch: int) -> None:
    """Seed a loader's worker for an epoch: the global generators, and those in attributes of the dataset."""
    info = get_worker_info()
    if info is None:
        return
    root = f"{base_seed} {epoch} {info.id}".encode()
    seed_global(drawn_from(root + b" -1"))
    seed_each(search(info.dataset).generators, root + b" ")


def seed_each(found: Iterable[Any], root: bytes) -> None:
    """Seed generators that `search` has found, each by its place among them."""
    for place, generator in enumerate(found):
        _seed(generator, drawn_from(root + str(place).encode()))


def drawn_from(root: bytes) -> bytes:
    """Return random bytes for one generator."""
    return hashlib.blake2b(root, digest_size=16).digest()
