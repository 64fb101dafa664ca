"""Lightning's `Trainer` as a protected job: see docs/frameworks.md.

A step of the job is one update of the optimizer (with manual optimization: one batch). Lightning's own loops run, and
their counters are protected. Before each update, the loop asks for the index of the next one. After a loss, that may be an
earlier one: the counters have been restored by then, and the batches continue at that position.
"""

import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.strategies import DDPStrategy

import deadpool_run as deadpool
from deadpool_run.errors import ScriptError
from deadpool_run.integrations.driver import StepDriver, guard
from deadpool_run.integrations.seekable import SeekableLoader


def protect(trainer: Trainer) -> Trainer:
    """Protect `trainer.fit`, so that it continues after a loss; return the trainer.

    Its module, optimizers, schedulers, precision, callbacks, progress and epoch metrics are protected. Raises ScriptError
    if `deadpool_run.init()` was not called first.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    if not isinstance(epoch_loop, _Protected):
        kind = type(epoch_loop)
        epoch_loop.__class__ = type(kind.__name__, (_Protected, kind), {})
        epoch_loop.deadpool = _Loop(trainer, deadpool.init())
    return trainer


class ProtectedDDPStrategy(DDPStrategy):
    """Protected DistributedDataParallel, with the arguments of `DDPStrategy`."""

    def setup_environment(self) -> None:
        """See `Strategy.setup_environment`."""
        deadpool.init()
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """See `Strategy.setup`."""
        super().setup(trainer)
        if trainer.state.fn == "fit":
            protect(trainer)


class _Protected:
    """Overrides methods of Lightning's loop over the batches of an epoch."""

    deadpool: "_Loop"

    def run(self, _data_fetcher: Any) -> None:
        """Run the epoch. After the last update of all, ask for another, which may be one to repeat."""
        loop = self.deadpool
        loop.begin()
        super().run(loop.fetcher)  # type: ignore[misc]
        while loop.to_repeat():
            self._continue_epoch(loop.fetcher)

    def _continue_epoch(self, fetcher: Any) -> None:
        """Run as Lightning's `run`, but without the reset at the start of an epoch."""
        while not self.done:  # type: ignore[attr-defined]
            try:
                self.advance(fetcher)
                self.on_advance_end(fetcher)  # type: ignore[attr-defined]
            except StopIteration:
                break
            finally:
                self.on_iteration_done()  # type: ignore[attr-defined]

    def on_run_start(self, fetcher: Any) -> None:
        """Set the position in the epoch. There is no iterator to create."""
        fetcher.fetched = self.batch_progress.current.ready  # type: ignore[attr-defined]

    def advance(self, fetcher: Any) -> None:
        """Run one batch; before an update's first batch, ask for the update's index."""
        if not self.deadpool.proceed():
            raise StopIteration
        super().advance(fetcher)  # type: ignore[misc]


class _Fetcher:
    """The loop's data fetcher: the batches of one epoch, in order."""

    def __init__(self, batches: SeekableLoader, length: int) -> None:
        self.batches = batches
        self.length = length
        self.fetched = 0
        self.place: tuple[int, int] = (-1, 0)
        self._rest: Iterator[Any] = iter(())

    def move(self, epoch: int, position: int) -> None:
        """Move to a position of an epoch, if it is not there already."""
        if self.place != (epoch, position):
            self.place, self.fetched = (epoch, position), position
            # In the first epoch, Lightning has already created an iterator, which has drawn its seed.
            self._rest = self.batches.at(epoch, position, draw=epoch > 0)

    def __next__(self) -> tuple[Any, int, int]:
        batch = next(self._rest)
        epoch, position = self.place
        self.place, self.fetched = (epoch, position + 1), position + 1
        return batch, position, 0

    @property
    def done(self) -> bool:
        return self.fetched >= self.length


class _Loop(StepDriver):
    """Connects Lightning's loops with the job's."""

    fetcher: _Fetcher

    def __init__(self, trainer: Any, job: deadpool.Job) -> None:
        super().__init__(trainer, job)
        self._asked = False  # the index is that of an update that has not started
        self._total = 0

    def begin(self) -> None:
        """Protect Lightning's objects, and replace its batches. Once."""
        if self._steps is not None:
            return
        trainer = self._trainer
        loaders = trainer.fit_loop._combined_loader  # noqa: SLF001 - Lightning has no public name for what follows
        if len(loaders.flattened) != 1:
            raise ScriptError(
                f"a Trainer with {len(loaders.flattened)} training DataLoaders cannot be protected, only one with a single DataLoader.\n"
                "Combine their datasets into one."
            )
        loaders._iterator.iterators = []  # noqa: SLF001 - ends the workers of the unused iterator
        self.fetcher = _Fetcher(SeekableLoader(loaders.flattened[0]), int(trainer.num_training_batches))
        self._protect()
        for owner, name in ((trainer, "save_checkpoint"), (trainer._logger_connector, "log_metrics")):  # noqa: SLF001
            setattr(owner, name, self._only_for_real(getattr(owner, name)))
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else sys.maxsize
        self._total = epochs * self._updates
        if trainer.max_steps >= 0:
            self._total = min(self._total, trainer.max_steps)
        self._steps = iter(self.job.steps(self._total))

    def proceed(self) -> bool:
        """Before the first batch of an update, ask for its index, and move there. False if there is none."""
        ready = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if ready % self._accumulated == 0 or self._asked:
            if not self._asked:
                self.next()
            self._asked = False
            if self._index is None:
                return False
            epoch, update = divmod(self._index, self._updates)
            self.fetcher.move(epoch, update * self._accumulated)
        return True

    def to_repeat(self) -> bool:
        """After an epoch: return whether to repeat an update. Asks only after the last update or an interrupted one."""
        if self._index is None or not (self._index + 1 >= self._total or self.job.interrupted):
            return False
        self._asked = self.next() is not None
        return self._asked

    @property
    def _accumulated(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    @property
    def _updates(self) -> int:
        return math.ceil(self.fetcher.length / self._accumulated)

    def _protect(self) -> None:
        trainer, job = self._trainer, self.job
        job.protect(model=trainer.strategy.model, batches=self.fetcher.batches, progress=_Progress(trainer))
        for number, optimizer in enumerate(trainer.optimizers):
            guard(optimizer)
            job.protect(**{f"optimizer{number}": optimizer})
        for number, config in enumerate(trainer.lr_scheduler_configs):
            job.protect(**{f"scheduler{number}": config.scheduler})

    def _only_for_real(self, function: Any) -> Any:

        @functools.wraps(function)
        def unless_discarded(*args: Any, **kwargs: Any) -> Any:
            if not self.is_discarded:
                return function(*args, **kwargs)
            return None

        return unless_discarded


class _Progress:
    """The loops' counters, the epoch's metrics so far, and the state of callbacks and precision."""

    _SUMS = ("value", "cumulated_batch_size")

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        fit, epoch = trainer.fit_loop, trainer.fit_loop.epoch_loop
        parts = (fit, epoch, epoch.automatic_optimization, epoch.manual_optimization, epoch.val_loop)
        self._counters = {
            f"{number}.{name}": value
            for number, part in enumerate(parts)
            for name, value in vars(part).items()
            if isinstance(value, _BaseProgress)
        }

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "counters": {name: counter.state_dict() for name, counter in self._counters.items()},
            "stepped": trainer.fit_loop.epoch_loop._batches_that_stepped,  # noqa: SLF001
            "should_stop": trainer.should_stop,
            "metrics": {
                name: [getattr(metric, each) for each in self._SUMS if hasattr(metric, each)]
                for name, metric in self._results.items()
            },
            "callbacks": [callback.state_dict() for callback in trainer.callbacks],
            "precision": trainer.precision_plugin.state_dict(),
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, counter in self._counters.items():
            counter.load_state_dict(values["counters"][name])
        trainer.fit_loop.epoch_loop._batches_that_stepped = values["stepped"]  # noqa: SLF001
        trainer.should_stop = values["should_stop"]
        for name, metric in self._results.items():
            for attribute, value in zip(self._SUMS, values["metrics"].get(name, ()), strict=False):
                setattr(metric, attribute, value)
        for callback, state in zip(trainer.callbacks, values["callbacks"], strict=True):
            callback.load_state_dict(state)
        if values["precision"]:
            trainer.precision_plugin.load_state_dict(values["precision"])

    @property
    def _results(self) -> dict[str, Any]:
        """The sums of `self.log(..., on_epoch=True)` so far."""
        results = self._trainer.fit_loop.epoch_loop._results  # noqa: SLF001
        return {name: metric for name, metric in results.items() if metric.is_tensor}
