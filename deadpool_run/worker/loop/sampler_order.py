"""The order of an epoch: a loader's sampler, drawn again and skipped without loading anything.

The sampler draws at the same time and from the same generators as in a loop over the loader itself, so that a loop under
`Job.batches` sees the same order. A custom sampler may draw lazily, between the training's own draws: it gets a private
random state, which starts from the state that its first draw leaves.
"""

import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch.utils.data import DataLoader

from deadpool_run.worker.loop.worker_seeds import SeededCollate, SeededIndices
from deadpool_run.worker.state.rng import RngStates, put_rng, take_rng


@contextmanager
def isolated() -> Iterator[None]:
    """Restore every global generator at the end."""
    states = take_rng()
    try:
        yield
    finally:
        put_rng(states)


class SamplerOrder:
    """Replaces a DataLoader's sampler. One per loader, because its persistent workers keep it."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._place = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._inner: Any = getattr(loader, self._place)
        self._foreign = any(not type(each).__module__.startswith("torch.utils.data") for each in samplers(loader))
        self._seed: bytes | None = None
        self._skip = 0
        self._pass: _Pass | None = None

    def iterate(self, loader: DataLoader[Any], *, seed: bytes | None, skip: int) -> Iterator[Any]:
        """Return the loader's iterator after its first `skip` batches; `seed` seeds its workers, if it has any.

        Everything drawn for the skipped batches is drawn before this returns.
        """
        self._seed, self._skip = seed, skip
        attributes = vars(loader)  # torch forbids setting these; they are restored once the iterator is made
        collate = attributes["collate_fn"]
        attributes |= {self._place: self, "collate_fn": collate if seed is None else SeededCollate(collate)}
        try:
            iterator = iter(loader)
        finally:
            attributes |= {self._place: self._inner, "collate_fn": collate}
        if self._pass is not None:
            self._pass.catch_up()
        return iterator

    def digest(self, count: int) -> int:
        """Return a digest of the first `count` batches' indices. A later call has the same count, or a higher one."""
        return 0 if self._pass is None else self._pass.digest(count)

    def is_as_before(self, done: int, order: int | None, ahead: tuple[int, int] | None) -> bool:
        """Compare with what another process has drawn: the digest of its first `done` indices, and its `ahead()`. None is unknown."""
        if self._pass is None:
            return order in (None, 0)
        return (ahead is None or self._pass.may_have_drawn(*ahead)) and order in (None, self._pass.digest(done))

    def ahead(self) -> tuple[int, int]:
        """Return how many batches' indices were drawn, for workers in advance, and a digest of them."""
        return (0, 0) if self._pass is None else self._pass.drawn()

    def __iter__(self) -> Iterator[Any]:
        self._pass = _Pass(iter(self._inner), foreign=self._foreign, skip=self._skip, seed=self._seed)
        return self._pass

    def __len__(self) -> int:
        return len(self._inner)


class _Pass:
    """One pass over a sampler."""

    def __init__(self, inner: Iterator[Any], *, foreign: bool, skip: int, seed: bytes | None) -> None:
        self._inner = inner
        self._foreign = foreign
        self._skip = skip
        self._seed = seed
        self._number = 0
        self._stream: RngStates | None = None
        self._digests = {0: 0}
        """By the number of indices drawn."""

    def __iter__(self) -> "_Pass":
        return self

    def __next__(self) -> Any:
        self.catch_up()
        index = self._draw()
        return index if self._seed is None else SeededIndices(index, self._seed, self._number)

    def catch_up(self) -> None:
        while self._number < self._skip:
            self._draw()

    def digest(self, count: int) -> int:
        for older in [number for number in self._digests if number < min(count, self._number)]:
            del self._digests[older]
        return self._digests.get(count, 0)

    def drawn(self) -> tuple[int, int]:
        return self._number, self._digests[self._number]

    def may_have_drawn(self, count: int, digest: int) -> bool:
        return self._digests.get(count, digest) == digest

    def _draw(self) -> Any:
        index = self._next_index()
        self._digests[self._number + 1] = zlib.crc32(_encoded(index), self._digests[self._number])
        self._number += 1
        return index

    def _next_index(self) -> Any:
        if self._stream is None:
            index = next(self._inner)
            self._stream = take_rng() if self._foreign else None
            return index
        with isolated():
            put_rng(self._stream)
            index = next(self._inner)
            self._stream = take_rng()
        return index


def _encoded(index: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(index, enc_hook=_plain)
    except (TypeError, ValueError, OverflowError):
        return b""


def _plain(index: Any) -> Any:
    """Return the numbers of a tensor or an array; the class of another object, which may show its address."""
    return index.tolist() if hasattr(index, "tolist") else type(index).__qualname__


def samplers(loader: Any) -> list[Any]:
    """Return a loader's samplers and the samplers inside them, the outermost first."""
    found = [loader]
    for part in found:  # grows while it is read
        for name in ("batch_sampler", "sampler"):
            inner = getattr(part, name, None)
            if inner is not None and not any(inner is known for known in found):
                found.append(inner)
    return found[1:]


def set_epoch(parts: Iterable[Any], epoch: int) -> None:
    """Call `set_epoch` on the parts that have it."""
    for each in parts:
        if callable(getattr(each, "set_epoch", None)):
            each.set_epoch(epoch)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Return the generators that a script gave to a loader and its samplers."""
    found: Iterable[Any] = (getattr(each, "generator", None) for each in [loader, *samplers(loader)])
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())
