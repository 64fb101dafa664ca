"""`Job.batches`: the batches of a loader, which continue after a repair at the batch of the repeated step.

A map-style DataLoader is repositioned by index: the epoch's order is drawn again from the generator states at its start,
and used indices are skipped without loading them. A loader with `state_dict` repositions itself.
"""

import hashlib
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from deadpool_run.errors import RefusedError, ScriptError
from deadpool_run.worker.codec import has_state, raw_bytes, table_of
from deadpool_run.worker.compat.loaders import has_workers, set_workers, workers_of
from deadpool_run.worker.compat.modules import is_dense, tree_flatten, tree_unflatten, writes_of
from deadpool_run.worker.loop.loader_values import LoaderValues
from deadpool_run.worker.loop.sampler_order import SamplerOrder, generators_of, isolated, samplers, set_epoch
from deadpool_run.worker.state.digest import sample
from deadpool_run.worker.state.rng import put_rng, take_rng
from deadpool_run.worker.variables.values.tensors import is_numeric_array, sample_of_array
from deadpool_run.worker.verify.script_names import warn

NAME = "deadpool.batches"
"""The name under which a job protects its position in the data."""
_KEPT = 3
"""Batches kept, so that a survivor that repeats a step or two does not load them again."""
_DEEPEST = 3
_ATOMS = (type(None), bool, int, float, str, bytes)


def refuse_shared(loaders: Sequence[Any]) -> None:
    """Raise `ScriptError` if loaders share a sampler or a generator: to reposition one would move the other."""
    seen: dict[int, Any] = {}
    for loader in loaders:
        parts = {id(each): each for each in (loader, *samplers(loader), *generators_of(loader))}
        shared = [type(seen[key]).__name__ for key in parts if key in seen]
        if shared:
            raise ScriptError(
                f"batches(): two loaders share a {shared[0]}, and one cannot be repositioned without the other.\n"
                "Give each loader its own sampler and its own generator."
            )
        seen |= parts


@dataclass(slots=True)
class _Position:
    """A position before a batch. `start` holds the states of the generators, and the values, at the epoch's start."""

    epoch: int
    done: int
    start: dict[str, Any] | None = None
    loader: Any = None
    order: int | None = None
    """A digest of the indices of the batches before, or of these batches themselves; None if unknown."""
    ahead: tuple[int, int] | None = None
    """How many indices were drawn by then, with those that workers got in advance, and a digest of them."""

    @property
    def key(self) -> tuple[int, int]:
        return self.epoch, self.done


class Batches:
    """The batches of a loader, epoch after epoch. Protected by its `state_dict`, like any other object."""

    def __init__(self, loader: Any, *, replay: bool = False, number: int = 0) -> None:
        """`replay` allows a loader that can only be repositioned by reading it again from the start of the epoch.

        `number` is that of the loader among those that are read together. Raises `ScriptError` for a loader that cannot be repositioned.
        """
        self.epoch = 0
        """The epoch of the batch that was taken last."""
        self._loader = loader
        self._number = number
        self._stateful = has_state(loader)
        is_by_index = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
        if not (self._stateful or is_by_index or replay):
            raise ScriptError(_refusal(loader))
        # Loading in the main process draws from the generators, so that a batch has to be loaded again.
        self._keeps = isinstance(loader, DataLoader) and loader.num_workers > 0
        if self._stateful and self._keeps:
            warn(
                f"batches(): the state_dict() of a {type(loader).__name__} does not hold the random state of its workers, so that "
                "random augmentation differs after a repair.\nSeed augmentation with the sample's index and the epoch, or use "
                "a DataLoader over a map-style dataset, whose workers are seeded again."
            )
        self._order = SamplerOrder(loader) if is_by_index and not self._stateful else None
        self._values = LoaderValues(loader)
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._at = _Position(0, 0)
        self._iterator: Iterator[Any] | None = None
        self._read = 0
        """A digest of the epoch's batches so far, of a loader that is read again."""
        self._next: tuple[int, int] | None = None
        """The key of the iterator's next batch; None without an iterator."""

    def per_epoch(self) -> int:
        """Return the number of batches in an epoch. Raises `ScriptError` if the loader has no length."""
        try:
            return len(self._loader)
        except TypeError:
            raise ScriptError(
                f"batches(): a {type(self._loader).__name__} has no len(), so that the number of steps is unknown.\n"
                "Pass steps=..., the total number of steps, in place of epochs=..."
            ) from None

    def take(self) -> Any:
        """Return the next batch; sets `epoch`. Raises `ScriptError` if an epoch is empty."""
        key = self._at.key
        kept = self._kept.get(key)
        if kept is not None and kept.is_unchanged():
            self.epoch, self._at = kept.after.epoch, kept.after
            return kept.batch()
        if self._next != key:
            self._reposition(self._at)
        batch = self._fetch()
        self.epoch = self._at.epoch
        if self._keeps and key[1] and self.epoch == key[0]:  # not the first of an epoch: starting an epoch draws, too
            self._kept[key] = _Kept(batch, self._at)
            for old in list(self._kept)[:-_KEPT]:
                del self._kept[old]
        return batch

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        at = self._at
        if self._stateful and at.loader is None and self._next == at.key:
            at.loader = self._loader.state_dict()
        start, own = at.start, self._own_states()
        if start is None:  # the epoch has not started: it will start from the present states
            start = {"global": None, "own": own, "made": workers_of(self._loader)}
        return {
            "epoch": at.epoch,
            "done": at.done,
            "begun": start,
            "loader": at.loader,
            "order": at.order,
            "ahead": at.ahead,
            "own": own,
            "values": self._values.take(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position, and the loader's own generators and values. The loader is repositioned when the next batch is taken."""
        start = state["begun"]
        if self._next != (state["epoch"], state["done"]) and self._has_drawn(state):
            self._kept.clear()
        if start["global"] is None:
            self._put_generators(start)
            start = self._next = None
        if "own" in state:  # else of a checkpoint of an earlier version
            self._put_own(state["own"])
            self._values.put(state["values"])
        self._at = _Position(
            state["epoch"], state["done"], start, state["loader"], state.get("order"), state.get("ahead")
        )

    # --- the loader ----------------------------------------------------------------------------------------------

    def _fetch(self) -> Any:
        """Return the iterator's next batch: the next epoch's first, if this epoch is over."""
        at = self._at
        for epoch in (at.epoch, at.epoch + 1):
            if self._iterator is None:
                start = self._begin()
                self._at = _Position(epoch, 0, start)
                self._iterator = self._iterate(epoch, start, skip=0)
            try:
                batch = next(self._iterator)
            except StopIteration:
                self._iterator = self._next = None
                continue
            at = self._at
            self._note(batch)
            ahead = None if self._order is None else self._order.ahead()
            self._at = _Position(at.epoch, at.done + 1, at.start, order=self._digest(at.done + 1), ahead=ahead)
            self._next = self._at.key
            return batch
        raise ScriptError("batches(): the loader gave no batch for a whole epoch.\nPass a loader that is not empty.")

    def _reposition(self, at: _Position) -> None:
        """Make an iterator at this position, and leave all generators and values as they are."""
        self._iterator = None
        if at.start is None and (not self._stateful or at.loader is None):
            return  # the epoch has not started
        own = self._own_states()
        try:
            with isolated(), self._as_of(at.start or {}):
                self._iterator = self._restarted(at)
        finally:
            self._put_own(own)
        if self._order is None:
            if at.order not in (None, self._digest(at.done)):
                raise RefusedError(_other_batches(self._loader, at.epoch))
        elif not self._order.is_as_before(at.done, at.order, at.ahead):
            raise RefusedError(_other_order(self._loader, at.epoch))
        self._next = at.key

    def _note(self, batch: Any) -> None:
        """Note a batch of a loader that is read again from the start of an epoch."""
        if self._order is None and not self._stateful:
            self._read = zlib.crc32(repr(_content(batch)).encode(errors="replace"), self._read)

    def _digest(self, done: int) -> int | None:
        """Return a digest of what the present epoch has given up to this batch; None for a loader that repositions itself."""
        if self._order is not None:
            return self._order.digest(done)
        return None if self._stateful else self._read

    def _restarted(self, at: _Position) -> Iterator[Any]:
        if self._stateful and at.loader is not None:
            self._set_epoch(at.epoch)
            self._loader.load_state_dict(at.loader)
            return iter(self._loader)
        assert at.start is not None
        self._put_generators(at.start)
        put_rng(at.start["global"])
        return self._iterate(at.epoch, at.start, skip=at.done)

    def _as_of(self, start: dict[str, Any]) -> AbstractContextManager[None]:
        is_anew = start.get("made") is None or not has_workers(self._loader)
        values, of_workers = start.get("values", {}), start.get("workers")
        return self._values.as_of(values, of_workers, for_new_workers=self._keeps and is_anew)

    def _iterate(self, epoch: int, start: dict[str, Any], *, skip: int) -> Iterator[Any]:
        self._set_epoch(epoch)
        if self._order is not None:
            seed = _seed(start, epoch, self._number) if self._keeps else None
            return self._order.iterate(self._loader, seed=seed, skip=skip)
        iterator: Iterator[Any] = iter(self._loader)
        self._read = 0
        for _ in range(skip):
            self._note(next(iterator))
        return iterator

    def _set_epoch(self, epoch: int) -> None:
        set_epoch([self._loader, *samplers(self._loader)], epoch)

    def _begin(self) -> dict[str, Any]:
        """Return the states of the generators, and the values, before an epoch starts."""
        made = workers_of(self._loader)
        earlier = None if made is None else self._at.start
        start = {"global": take_rng(), "own": self._own_states(), "made": made, "values": self._values.take()}
        if earlier is not None:  # its workers have the values with which they were made
            start["workers"] = earlier.get("workers", earlier.get("values", {}))
        return start

    def _own_states(self) -> list[torch.Tensor]:
        return [each.get_state() for each in generators_of(self._loader)]

    def _put_own(self, states: Sequence[torch.Tensor]) -> None:
        for generator, state in zip(generators_of(self._loader), states, strict=True):
            generator.set_state(state)

    def _has_drawn(self, state: dict[str, Any]) -> bool:
        """Return whether generators or values of the samplers have changed since, so that an iterator may not go on."""
        own_changed = not all(map(torch.equal, state.get("own", ()), self._own_states()))
        return own_changed or self._values.have_samplers_changed(state.get("values", {}))

    def _put_generators(self, start: dict[str, Any]) -> None:
        """Set the loader's own generators, and its persistent workers."""
        self._put_own(start["own"])
        set_workers(self._loader, start.get("made"))


class _Kept:
    """A batch, and the position after it; the write counts of its leaves show whether the script has changed it."""

    def __init__(self, batch: Any, after: _Position) -> None:
        self.after = after
        self._leaves, self._spec = tree_flatten(batch)
        self._counts = [_count(leaf) for leaf in self._leaves]

    def is_unchanged(self) -> bool:
        """Return whether nothing can have changed the leaves."""
        return None not in self._counts and self._counts == [_count(leaf) for leaf in self._leaves]

    def batch(self) -> Any:
        """Return the batch in new containers: the script may have changed the old ones."""
        return tree_unflatten(self._leaves, self._spec)


def _count(leaf: Any) -> int | None:
    if isinstance(leaf, torch.Tensor):
        return None if leaf.is_inference() else writes_of(leaf)
    return 0 if isinstance(leaf, _ATOMS) else None


def _content(value: Any, depth: int = 0) -> list[Any]:
    """Return something whose text shows what is in a batch, also in attributes of objects there."""
    found: list[Any] = []
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            found.append(sample(leaf) if is_dense(leaf) and not leaf.is_nested else None)
        elif is_numeric_array(leaf):
            found.append(sample_of_array(leaf))
        elif isinstance(leaf, _ATOMS):
            found.append(leaf)
        elif depth < _DEEPEST:
            found.append([_content(each, depth + 1) for each in table_of(leaf).values()])
    return found


def _seed(start: dict[str, Any], epoch: int, number: int) -> bytes:
    """Return what seeds the workers in an epoch. With persistent workers, an epoch may start from the states of the one before."""
    found = hashlib.blake2b(start["global"]["torch"], digest_size=16)
    for own in start["own"]:
        found.update(raw_bytes(own))
    found.update(f"{epoch} {number}".encode())
    return found.digest()


def _other_order(loader: Any, epoch: int) -> str:
    kind = type(samplers(loader)[-1]).__name__
    return (
        f"batches(): the order of epoch {epoch} cannot be repeated after a loss: the {kind} drew other indices than before, though it had "
        "the generators and the attributes of the epoch's start.\nLet the order depend on torch's, NumPy's and Python's generators, "
        "set_epoch(), and numbers, lists and tensors in the sampler's attributes only, and on no generator that the script uses too."
    )


def _other_batches(loader: Any, epoch: int) -> str:
    return (
        f"batches(): epoch {epoch} cannot be read again after a loss: the {type(loader).__name__} gave other batches than before.\n"
        "Let it draw only from generators of its own that are seeded at the start of the epoch, or add state_dict() and load_state_dict()."
    )


def _refusal(loader: Any) -> str:
    kind = type(loader).__name__
    over = f" over an IterableDataset ({type(loader.dataset).__name__})" if isinstance(loader, DataLoader) else ""
    return (
        f"batches(): a {kind}{over} cannot continue in the middle of an epoch after a repair: it has neither indices nor "
        "state_dict().\nAdd state_dict() and load_state_dict() (torchdata's StatefulDataLoader has them), or pass replay=True "
        "to read it again from the start of the epoch after each repair."
    )
