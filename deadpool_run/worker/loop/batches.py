"""Where a training stands in its data: `Job.batches` over a loader, put back exactly after a repair.

A map-style DataLoader is put back by index: the order of the epoch is drawn again from the generators' states of its
beginning, and what was used already is skipped in the order, never loaded. A loader with `state_dict` puts itself back.
"""

import hashlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from deadpool_run.errors import ScriptError
from deadpool_run.worker.codec import has_state, raw_bytes
from deadpool_run.worker.compat.modules import dismiss_workers, has_workers, tree_flatten, tree_unflatten, writes_of
from deadpool_run.worker.loop.sampler_order import SamplerOrder, generators_of, isolated, samplers, set_epoch
from deadpool_run.worker.state.rng import put_rng, rng_states, rng_tree, take_rng

NAME = "deadpool.batches"
"""The name under which a job protects its place in the data."""
_KEPT = 3
"""Batches that are kept, so that a survivor that repeats a step or two need not load them again."""
_ATOMS = (type(None), bool, int, float, str, bytes)


@dataclass(slots=True)
class _Place:
    """Before which batch the training stands. `begun` are the generators' states of the epoch's beginning."""

    epoch: int
    done: int
    begun: dict[str, Any] | None = None
    loader: Any = None

    @property
    def key(self) -> tuple[int, int]:
        return self.epoch, self.done


@dataclass(slots=True)
class _Kept:
    """A batch that was given out, in parts, and where the training stood behind it."""

    batch: "_Parts"
    epoch: int
    behind: _Place


class Batches:
    """The batches of a loader, epoch after epoch. Protected like any other object, by `state_dict`."""

    def __init__(self, loader: Iterable[Any], *, replay: bool = False) -> None:
        """`replay` allows a loader that can only be put back by reading it again from the beginning of the epoch.

        Raises `ScriptError` for any other loader that cannot be put back.
        """
        self.epoch = 0
        """Of the batch that was taken last."""
        self._loader: Any = loader
        self._stateful = has_state(loader)
        self._by_index = not self._stateful and _is_by_index(loader)
        if not (self._stateful or self._by_index or replay):
            raise ScriptError(_refusal(loader))
        if self._stateful and isinstance(loader, DataLoader) and loader.num_workers > 0:
            warnings.warn(
                f"batches(): what the workers of a {type(loader).__name__} draw (random augmentation) is in no state_dict() "
                "of it, and is drawn otherwise after a repair.\nDraw from the sample's index and the epoch, or use a "
                "DataLoader over a map-style dataset, whose workers' draws are put back.",
                RuntimeWarning,
                stacklevel=3,
            )
        self._order = SamplerOrder(loader) if self._by_index and isinstance(loader, DataLoader) else None
        # In the main process, to load a batch draws from the generators: a batch is then always loaded again.
        self._keeps = isinstance(loader, DataLoader) and loader.num_workers > 0
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._at = _Place(0, 0)
        self._iterator: Iterator[Any] | None = None
        self._next: tuple[int, int] | None = None
        """Before which batch the iterator stands; None if there is none."""

    def per_epoch(self) -> int:
        """Return how many batches an epoch has. Raises `ScriptError` if the loader does not say."""
        try:
            return len(self._loader)
        except TypeError:
            raise ScriptError(
                f"batches(): a {type(self._loader).__name__} does not say how many batches it has.\n"
                "Give steps=..., the number of steps in all, in place of epochs=..."
            ) from None

    def take(self) -> Any:
        """Return the next batch; sets `epoch`. Raises `ScriptError` if an epoch is empty."""
        key = self._at.key
        kept = self._kept.get(key)
        if kept is not None and (whole := kept.batch.whole()) is not None:
            self.epoch, self._at = kept.epoch, kept.behind
            return whole[0]
        if self._next != key:
            self._stand(self._at)
        batch = self._fetch()
        self.epoch = self._at.epoch
        if self._keeps and key[1] and self.epoch == key[0]:  # not where an epoch began: to begin it draws, too
            self._kept[key] = _Kept(_Parts(batch), self.epoch, self._at)
            for old in list(self._kept)[:-_KEPT]:
                del self._kept[old]
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return where the training stands."""
        at = self._at
        if self._stateful and at.loader is None and self._next == at.key:
            at.loader = self._loader.state_dict()
        begun = at.begun
        if begun is None:  # not begun: the generators as they are are those of its beginning
            begun = {"global": None, "own": [generator.get_state() for generator in self._generators()], "anew": True}
        return {"epoch": at.epoch, "done": at.done, "begun": begun, "loader": at.loader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state_dict` was called; the loader is put back when the next batch is taken."""
        begun = state["begun"]
        if begun["global"] is None:
            for generator, own in zip(self._generators(), begun["own"], strict=True):
                generator.set_state(own)
            self._dismiss(begun)
            begun = self._next = None
        self._at = _Place(state["epoch"], state["done"], begun, state["loader"])

    # --- the loader ----------------------------------------------------------------------------------------------

    def _fetch(self) -> Any:
        """Return the iterator's next batch, of the next epoch if this one is over."""
        at = self._at
        for epoch in (at.epoch, at.epoch + 1):
            if self._iterator is None:
                self._begin(epoch)
            assert self._iterator is not None
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._iterator = self._next = None
                continue
            place = self._at
            self._at = _Place(place.epoch, place.done + 1, place.begun)
            self._next = self._at.key
            return batch
        raise ScriptError("batches(): an epoch of the loader has no batch.\nGive a loader that is not empty.")

    def _begin(self, epoch: int) -> None:
        """Begin an epoch with the generators as they are."""
        begun = self._drawn()
        self._at = _Place(epoch, 0, begun)
        self._iterator = self._iterate(epoch, begun, skip=0)

    def _stand(self, place: _Place) -> None:
        """Have the iterator stand there, and the generators as they are now."""
        self._iterator = None
        if self._stateful and place.loader is not None:
            self._set_epoch(place.epoch)
            self._loader.load_state_dict(place.loader)
            with isolated():
                self._iterator = iter(self._loader)
            self._next = place.key
            return
        if place.begun is None:
            return  # the epoch has not begun
        for generator, state in zip(self._generators(), place.begun["own"], strict=True):
            generator.set_state(state)
        self._dismiss(place.begun)
        with isolated():
            put_rng(rng_states(place.begun["global"]))
            self._iterator = self._iterate(place.epoch, place.begun, skip=place.done)
        self._next = place.key

    def _iterate(self, epoch: int, begun: dict[str, Any], *, skip: int) -> Iterator[Any]:
        self._set_epoch(epoch)
        if self._order is not None:
            return self._order.iterate(self._loader, seed=_seed(begun), skip=skip)
        iterator: Iterator[Any] = iter(self._loader)
        for _ in range(skip):
            next(iterator)
        return iterator

    def _set_epoch(self, epoch: int) -> None:
        set_epoch([self._loader, *samplers(self._loader)], epoch)

    def _generators(self) -> list[torch.Generator]:
        return generators_of(self._loader)

    def _drawn(self) -> dict[str, Any]:
        """Return the states from which the order of the epoch that begins now is drawn."""
        own = [generator.get_state() for generator in self._generators()]
        return {"global": rng_tree(take_rng()), "own": own, "anew": not has_workers(self._loader)}

    def _dismiss(self, begun: dict[str, Any]) -> None:
        """Let persistent workers go that were not there yet: to make them draws from the generators, to keep them does not."""
        if begun["anew"] and has_workers(self._loader):
            dismiss_workers(self._loader)


class _Parts:
    """A batch, taken apart, so that it can be given out again if nobody has changed it."""

    def __init__(self, batch: Any) -> None:
        self._leaves, self._spec = tree_flatten(batch)
        self._counts = [_count(leaf) for leaf in self._leaves]

    def whole(self) -> tuple[Any] | None:
        """Return the batch; None if it is not known to be as it was."""
        if None in self._counts or self._counts != [_count(leaf) for leaf in self._leaves]:
            return None
        return (tree_unflatten(self._leaves, self._spec),)


def _count(leaf: Any) -> int | None:
    """Return how often a part of a batch has been written; None if nobody counts that."""
    if isinstance(leaf, torch.Tensor):
        return None if leaf.is_inference() else writes_of(leaf)
    return 0 if isinstance(leaf, _ATOMS) else None


def _seed(begun: dict[str, Any]) -> bytes:
    """Return what stands for the generators' states of the epoch's beginning."""
    found = hashlib.blake2b(begun["global"]["torch"], digest_size=16)
    for own in begun["own"]:
        found.update(raw_bytes(own))
    return found.digest()


def _is_by_index(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _refusal(loader: Any) -> str:
    kind = type(loader).__name__
    over = f" over an IterableDataset ({type(loader.dataset).__name__})" if isinstance(loader, DataLoader) else ""
    return (
        f"batches(): a {kind}{over} cannot be put back to where a lost rank stood: it has neither indices nor "
        "state_dict().\nGive it both state_dict() and load_state_dict() (torchdata's StatefulDataLoader has them), or "
        "say replay=True: it is then read again from the beginning of the epoch after each repair."
    )
