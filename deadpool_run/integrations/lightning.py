"""Lightning's `Trainer` as a protected job.

    from deadpool_run.integrations.lightning import ProtectedDDPStrategy

    trainer = Trainer(strategy=ProtectedDDPStrategy(), ...)
    trainer.fit(module)

or, with another strategy, `deadpool_run.init()` before the Trainer is made and `protect(trainer)` after.

A step of the job is one update of the optimizer (with manual optimization: one batch). Lightning's own loops run. All
that they count is in objects of theirs, which are protected; before each update it is asked which one is next, and if that
is another one, those objects have been put back by then, and the batches are taken from there on.
"""

import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.progress import _BaseProgress
from lightning.pytorch.strategies import DDPStrategy

import deadpool_run as deadpool
from deadpool_run.errors import ScriptError
from deadpool_run.integrations.driver import StepDriver, guard
from deadpool_run.integrations.seekable import SeekableLoader


def protect(trainer: Trainer) -> Trainer:
    """Have `trainer.fit` go on where a lost rank's work was; return the trainer.

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
    """DistributedDataParallel, protected. Takes what `DDPStrategy` takes."""

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
    """What the loop over an epoch's batches does differently. Stands before Lightning's own class."""

    deadpool: "_Loop"

    def run(self, _data_fetcher: Any) -> None:
        """Run the epoch; behind the last update of all it is asked for another, which may be one to repeat."""
        loop = self.deadpool
        loop.begin()
        super().run(loop.fetcher)  # type: ignore[misc]
        while loop.to_repeat():
            self._go_on(loop.fetcher)

    def _go_on(self, fetcher: Any) -> None:
        """As Lightning's `run`, but without the reset that begins an epoch."""
        while not self.done:  # type: ignore[attr-defined]
            try:
                self.advance(fetcher)
                self.on_advance_end(fetcher)  # type: ignore[attr-defined]
            except StopIteration:
                break
            finally:
                self.on_iteration_done()  # type: ignore[attr-defined]

    def on_run_start(self, fetcher: Any) -> None:
        """Say how far the epoch is. There is no iterator to make."""
        fetcher.fetched = self.batch_progress.current.ready  # type: ignore[attr-defined]

    def advance(self, fetcher: Any) -> None:
        """Run one batch, the next update's first one only after asking which that is."""
        if not self.deadpool.proceed():
            raise StopIteration
        super().advance(fetcher)  # type: ignore[misc]


class _Fetcher:
    """What the loop takes for its data fetcher: the batches of one epoch, in order."""

    def __init__(self, batches: SeekableLoader, length: int) -> None:
        self.batches = batches
        self.length = length
        self.fetched = 0
        self.place: tuple[int, int] = (-1, 0)
        self._rest: Iterator[Any] = iter(())

    def move(self, epoch: int, position: int) -> None:
        """Begin at a position of an epoch, unless that is where it is."""
        if self.place != (epoch, position):
            self.place, self.fetched = (epoch, position), position
            # In the first epoch Lightning has begun an iterator already, which has drawn its number.
            self._rest = self.batches.at(epoch, position, draw=epoch > 0)

    def __next__(self) -> tuple[Any, int, int]:
        batch = next(self._rest)
        epoch, position = self.place
        self.place, self.fetched = (epoch, position + 1), position + 1
        return batch, position, 0

    @property
    def done(self) -> bool:
        """Whether that was the epoch's last batch."""
        return self.fetched >= self.length


class _Loop:
    """Between Lightning's loops and the job's."""

    fetcher: _Fetcher

    def __init__(self, trainer: Any, job: deadpool.Job) -> None:
        self.job = job
        self._trainer = trainer
        self._driver: StepDriver | None = None
        self._index: int | None = None
        self._asked = False  # the index is of an update that has not begun yet
        self._total = 0

    def begin(self) -> None:
        """Protect what Lightning has made by now, and take its batches over. Once."""
        if self._driver is not None:
            return
        trainer = self._trainer
        loaders = trainer.fit_loop._combined_loader  # noqa: SLF001 - Lightning has no public name for what follows
        if len(loaders.flattened) != 1:
            raise ScriptError("several training DataLoaders cannot be protected.\nCombine them into one dataset.")
        loaders._iterator.iterators = []  # noqa: SLF001 - ends the workers of the iterator that nobody will use
        self.fetcher = _Fetcher(SeekableLoader(loaders.flattened[0]), int(trainer.num_training_batches))
        self._protect()
        for owner, name in ((trainer, "save_checkpoint"), (trainer._logger_connector, "log_metrics")):  # noqa: SLF001
            setattr(owner, name, self._only_for_real(getattr(owner, name)))
        epochs = trainer.max_epochs if trainer.max_epochs is not None and trainer.max_epochs >= 0 else sys.maxsize
        self._total = epochs * self._updates
        if trainer.max_steps >= 0:
            self._total = min(self._total, trainer.max_steps)
        self._driver = StepDriver(self.job, self._total)

    def proceed(self) -> bool:
        """Before a batch: if it is the first of an update, ask which one, and go there. False if there is none."""
        ready = self._trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if ready % self._accumulated == 0 or self._asked:
            assert self._driver is not None
            if not self._asked:
                self._index = self._driver.next()
            self._asked = False
            if self._index is None:
                return False
            epoch, update = divmod(self._index, self._updates)
            self.fetcher.move(epoch, update * self._accumulated)
        return True

    def to_repeat(self) -> bool:
        """Behind an epoch: whether some update is to be run again. Asks only if that was the last one, or was spoilt."""
        if self._index is None or not (self._index + 1 >= self._total or self.job.interrupted):
            return False
        assert self._driver is not None
        self._index = self._driver.next()
        self._asked = self._index is not None
        return self._asked

    @property
    def _accumulated(self) -> int:
        return int(self._trainer.accumulate_grad_batches)

    @property
    def _updates(self) -> int:
        """Return the updates of an epoch."""
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
        """Have a function do nothing in a step that is a rehearsal, or is known to be repeated."""

        @functools.wraps(function)
        def unless_for_practice(*args: Any, **kwargs: Any) -> Any:
            if self._driver is None or not self._driver.for_practice:
                return function(*args, **kwargs)
            return None

        return unless_for_practice


class _Progress:
    """The counters of the loops, the metrics of the epoch so far, and what callbacks and the precision keep."""

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
            "metrics": {name: list(_sums(metric)) for name, metric in self._results.items()},
            "callbacks": [callback.state_dict() for callback in self._callbacks],
            "precision": trainer.precision_plugin.state_dict(),
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        trainer = self._trainer
        for name, counter in self._counters.items():
            counter.load_state_dict(values["counters"][name])
        trainer.fit_loop.epoch_loop._batches_that_stepped = values["stepped"]  # noqa: SLF001
        trainer.should_stop = values["should_stop"]
        for name, metric in self._results.items():
            for attribute, value in zip(_SUMS, values["metrics"].get(name, ()), strict=False):
                setattr(metric, attribute, value)
        for callback, state in zip(self._callbacks, values["callbacks"], strict=True):
            callback.load_state_dict(state)
        if values["precision"]:
            trainer.precision_plugin.load_state_dict(values["precision"])

    @property
    def _results(self) -> dict[str, Any]:
        """What `self.log(..., on_epoch=True)` of numbers has summed up so far."""
        results = self._trainer.fit_loop.epoch_loop._results  # noqa: SLF001
        return {name: metric for name, metric in results.items() if metric.is_tensor}

    @property
    def _callbacks(self) -> list[Callback | LightningModule]:
        return list(self._trainer.callbacks)


_SUMS = ("value", "cumulated_batch_size")


def _sums(metric: Any) -> Iterator[Any]:
    for name in _SUMS:
        if hasattr(metric, name):
            yield getattr(metric, name)
