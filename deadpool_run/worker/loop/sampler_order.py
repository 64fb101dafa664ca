"""The order of an epoch: what a loader's sampler draws, drawn again and skipped without loading anything.

The sampler draws where it would in a loop over the loader itself, from the same generators, so that a loop under
`Job.batches` sees the same order. A sampler that is not torch's own may go on drawing as it is iterated, while the
training draws too: it is then given a stream of its own, which begins as its first draw leaves the generators.
"""

import hashlib
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from deadpool_run.worker.state.rng import RngStates, put_rng, take_rng

_TORCHS_OWN = "torch.utils.data"


@contextmanager
def isolated() -> Iterator[None]:
    """Leave every generator of the process as it was."""
    states = take_rng()
    try:
        yield
    finally:
        put_rng(states)


class SamplerOrder:
    """Takes the place of a DataLoader's sampler. One for the life of a loader: its persistent workers keep it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._inner: Any = getattr(loader, self._place)
        self._foreign = any(not type(each).__module__.startswith(_TORCHS_OWN) for each in samplers(loader))
        self._sends = loader.num_workers > 0
        self._seed = b""
        self._skip = 0
        self._drawing: _Drawing | None = None

    def iterate(self, loader: DataLoader[Any], *, seed: bytes, skip: int) -> Iterator[Any]:
        """Return the loader's iterator, behind its first `skip` batches; `seed` is what its workers' draws begin from.

        All that is drawn for what is skipped is drawn before this returns.
        """
        self._seed, self._skip = seed, skip
        attributes = vars(
            loader
        )  # torch forbids to set these; they are the user's again as soon as the iterator is made
        attributes[self._place] = self
        try:
            iterator = iter(loader)
        finally:
            attributes[self._place] = self._inner
        if self._drawing is not None:
            self._drawing.catch_up()
        return iterator

    def __iter__(self) -> Iterator[Any]:
        """Begin to draw."""
        seed = self._seed if self._sends else None
        self._drawing = _Drawing(iter(self._inner), foreign=self._foreign, skip=self._skip, seed=seed)
        return self._drawing

    def __len__(self) -> int:
        """Return how many there are in an epoch."""
        return len(self._inner)


class _Drawing:
    """One pass over a sampler."""

    def __init__(self, inner: Iterator[Any], *, foreign: bool, skip: int, seed: bytes | None) -> None:
        self._inner = inner
        self._foreign = foreign
        self._skip = skip
        self._seed = seed
        self._number = 0
        self._stream: RngStates | None = None

    def __iter__(self) -> "_Drawing":
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next indices."""
        self.catch_up()
        index = self._draw()
        return index if self._seed is None else _Sent(index, self._seed, self._number)

    def catch_up(self) -> None:
        """Draw what is to be skipped."""
        while self._number < self._skip:
            self._draw()

    def _draw(self) -> Any:
        self._number += 1
        if self._stream is None:
            index = next(self._inner)
            self._stream = take_rng() if self._foreign else None
            return index
        with isolated():
            put_rng(self._stream)
            index = next(self._inner)
            self._stream = take_rng()
        return index


class _Sent:
    """Indices on their way to a worker of a loader, whose generators they set as they arrive.

    So what a worker draws (random augmentation) depends on the epoch and the batch, and not on which worker it is or on
    what it loaded before: a worker that is started in the middle of an epoch draws the same.
    """

    def __init__(self, index: Any, seed: bytes, number: int) -> None:
        self._parts = index, seed, number

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        """Arrive as the bare indices."""
        return _arrive, self._parts


def _arrive(index: Any, seed: bytes, number: int) -> Any:
    if get_worker_info() is not None:
        drawn = hashlib.blake2b(seed + number.to_bytes(8, "little"), digest_size=16).digest()
        torch.manual_seed(int.from_bytes(drawn[:7], "little"))
        random.seed(drawn)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            numpy.seed(list(drawn))
    return index


def samplers(loader: Any) -> list[Any]:
    """Return a loader's samplers, from the outermost in: those that they draw from, too."""
    found: list[Any] = []
    within = [loader]
    while within:
        part = within.pop(0)
        for name in ("batch_sampler", "sampler"):
            inner = getattr(part, name, None)
            if inner is not None and not any(inner is known for known in found):
                found.append(inner)
                within.append(inner)
    return found


def set_epoch(parts: Iterable[Any], epoch: int) -> None:
    """Tell the epoch to those of a loader's parts that take it."""
    for each in parts:
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a script has given to a loader and its samplers."""
    found: Iterable[Any] = (getattr(each, "generator", None) for each in [loader, *samplers(loader)])
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
