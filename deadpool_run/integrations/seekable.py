"""The batches of a map-style DataLoader from any position of any epoch, without loading earlier ones.

For frameworks' loops, which name the epoch and the batch. `Job.batches` is for sequential loops: it iterates over the loader
itself, and a framework's loader would issue its own collectives then.
"""

import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from deadpool_run.errors import ScriptError
from deadpool_run.worker.loop.sampler_order import isolated, samplers, set_epoch

_KEPT = ("collate_fn", "num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context")


class SeekableLoader:
    """A DataLoader whose order is available for any epoch, and equals the loader's own order.

    A sampler with `set_epoch` gets the epoch. A sampler with its own generator draws from it epoch by epoch. Any other draws
    from generators seeded with `seed` and the epoch. `state_dict()` has all that another process needs to continue. Raises
    ScriptError for a loader whose batches have no index.
    """

    def __init__(self, loader: Any, seed: int = 0) -> None:
        if isinstance(loader.dataset, IterableDataset) or getattr(loader, "batch_sampler", None) is None:
            raise ScriptError(
                f"a {type(loader).__name__} over a {type(loader.dataset).__name__} cannot be protected: the batches of an "
                "IterableDataset, or of a DataLoader with batch_size=None, have no index.\n"
                "Use a map-style dataset with a batch size."
            )
        self.loader = loader
        self._seed = seed
        self._worker_seed = seed
        # The sampler's own generator; None if each epoch seeds it.
        own = (getattr(part, "generator", None) for part in samplers(loader) if not hasattr(part, "set_epoch"))
        self._generator = next((each for each in own if isinstance(each, torch.Generator)), None)
        self._epoch = 0
        self._begin = None if self._generator is None else self._generator.get_state()

    def __len__(self) -> int:
        """Return the number of this rank's batches in an epoch."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def at(self, epoch: int, position: int, *, draw: bool = True) -> Iterator[Any]:
        """Yield the epoch's batches from this position on.

        At the start of an epoch, one number is drawn from torch's global generator, as a DataLoader does for its workers' seeds:
        training then draws the same numbers as without us. `draw=False` if the loader has drawn it already. Otherwise the
        global generators do not change.
        """
        if draw and position == 0 and self.loader.generator is None:
            self._worker_seed = int(torch.empty((), dtype=torch.int64).random_().item())
        rest: DataLoader[Any] = DataLoader(
            self.loader.dataset,
            batch_sampler=self._order(epoch)[position:],
            generator=torch.Generator().manual_seed(self._worker_seed),
            prefetch_factor=self.loader.prefetch_factor if self.loader.num_workers else None,
            **{name: getattr(self.loader, name) for name in _KEPT},
        )
        yield from rest

    def state_dict(self) -> dict[str, Any]:
        """Return the seed of this epoch's workers, and the state of the sampler's generator at its start."""
        return {"worker_seed": self._worker_seed, "epoch": self._epoch, "begin": self._begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state of `state_dict`."""
        self._worker_seed, self._epoch, self._begin = state["worker_seed"], state["epoch"], state["begin"]

    def _order(self, epoch: int) -> list[Any]:
        with isolated():
            _seed_all(self._seed + epoch)
            set_epoch(samplers(self.loader), epoch)  # not of the loader: a framework's does more
            if self._generator is None or self._begin is None:
                return list(self.loader.batch_sampler)
            while True:
                self._generator.set_state(self._begin)
                order = list(self.loader.batch_sampler)
                if self._epoch >= epoch:
                    return order
                self._epoch, self._begin = self._epoch + 1, self._generator.get_state()


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed(seed)
