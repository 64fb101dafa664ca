"""Hugging Face's `Trainer` as a protected job: see docs/frameworks.md.

A step of the job is one update of the optimizer. The Trainer's own loop runs. Before each update it gets the index of the
next one; if that is not the expected one, its loop over the epoch starts again at that position.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import count, islice
from typing import Any

import transformers
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

import deadpool_run as deadpool
from deadpool_run.errors import ScriptError
from deadpool_run.integrations.driver import StepDriver, guard
from deadpool_run.integrations.seekable import SeekableLoader

_UNLESS_REAL = ("should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop")


def protect(trainer: Trainer) -> Trainer:
    """Protect the Trainer, so that it continues after a loss; return it.

    Its model, optimizer, scheduler, scaler, progress and stateful callbacks are protected. Raises ScriptError if
    `deadpool_run.init()` was not called first, or if this version of transformers is not supported.
    """
    if not callable(getattr(trainer, "_run_epoch", None)):
        raise ScriptError(
            f"transformers {transformers.__version__} has no Trainer._run_epoch().\nInstall transformers 5.23 or later."
        )
    kind = type(trainer)
    trainer.__class__ = type(kind.__name__, (_Protected, kind), {})
    trainer.deadpool = _Loop(trainer, deadpool.init())
    trainer.add_callback(trainer.deadpool)
    return trainer


class _Moved(Exception):  # noqa: N818 - control flow
    """Leaves the Trainer's loop over an epoch, because the next update is not the expected one."""


class _Protected:
    """Overrides methods of the Trainer's class."""

    deadpool: "_Loop"
    args: Any

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer.train`. Raises ScriptError for a checkpoint: a replacement could find a later one."""
        if resume_from_checkpoint:
            raise ScriptError(
                f"a protected Trainer cannot resume from a checkpoint of its own (resume_from_checkpoint={resume_from_checkpoint!r}): "
                "a replacement could find a later one.\n"
                "Use deadpool-run --durable, or load the weights before you create the Trainer."
            )
        return super().train(None, *args, **kwargs)  # type: ignore[misc]

    def get_train_dataloader(self) -> Any:
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        return SeekableLoader(super().get_train_dataloader(), seed)  # type: ignore[misc]

    def _run_epoch(self, **arguments: Any) -> None:
        self.deadpool.run(super()._run_epoch, **arguments)  # type: ignore[misc]

    def log(self, *args: Any, **kwargs: Any) -> None:
        if not self.deadpool.is_discarded:
            super().log(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if not self.deadpool.is_discarded:
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]


class _Loop(StepDriver, TrainerCallback):
    """Connects the Trainer's loop over epochs with the job's loop over steps."""

    _updates = 0
    """The number of updates in an epoch."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Correct the epoch's fraction: after a repair, the Trainer counts only the rest of the epoch."""
        assert self._index is not None
        state.epoch = (self._index + 1) / self._updates
        self.on_epoch_end(args, state, control)

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Clear the control flags of a step that will be repeated."""
        if self.job.interrupted:
            for name in _UNLESS_REAL:
                setattr(control, name, False)

    def run(self, epoch_of_trainer: Callable[..., None], **arguments: Any) -> None:
        """Replace `Trainer._run_epoch`: run the epoch of the next step, to its end."""
        loader, in_epoch = arguments.pop("train_dataloader"), arguments.pop("steps_in_epoch")
        self._updates = arguments.pop("num_update_steps_per_epoch")
        del arguments["epoch"]
        if self._steps is None:
            self._begin(loader)
        self.next()
        while self._index is not None:
            epoch, update = divmod(self._index, self._updates)
            skipped = update * self._trainer.args.gradient_accumulation_steps
            self._trainer.control.should_training_stop = False
            try:
                epoch_of_trainer(
                    epoch=epoch,
                    train_dataloader=self._batches(loader, epoch, skipped),
                    steps_in_epoch=in_epoch - skipped,
                    num_update_steps_per_epoch=self._updates - update,
                    **arguments,
                )
            except _Moved:
                continue
            # After the last update, ask for another: that waits until all is committed, or returns an update to repeat.
            at_end = self._trainer.state.global_step >= self._trainer.state.max_steps
            if not (at_end or self.job.interrupted):
                return
            self.next()

    def _batches(self, loader: SeekableLoader, epoch: int, skipped: int) -> Iterator[Any]:
        """Yield the micro-batches; ask for the next update before the first one of each update."""
        accumulated = self._trainer.args.gradient_accumulation_steps
        rest = loader.at(epoch, skipped)
        for number in count():
            if number and number % accumulated == 0:
                assert self._index is not None
                expected = self._index + 1
                if self.next() != expected:
                    raise _Moved
            yield from islice(rest, 1)  # loads the batch, if there is one, only in its step

    def _begin(self, loader: SeekableLoader) -> None:
        trainer, job = self._trainer, self.job
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        guard(optimizer)
        job.protect(model=trainer.model_wrapped, optimizer=optimizer, batches=loader, progress=_Progress(trainer))
        if trainer.lr_scheduler is not None:
            job.protect(scheduler=trainer.lr_scheduler)
        if trainer.accelerator.scaler is not None:
            job.protect(scaler=trainer.accelerator.scaler)
        self._steps = iter(job.steps(trainer.state.max_steps))


class _Progress:
    """The Trainer's counters, history, control flags and running loss, and the state of its callbacks."""

    _NUMBERS = ("_total_loss_scalar", "_globalstep_last_logged", "current_flos")

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    @property
    def _callbacks(self) -> list[Any]:
        return [each for each in self._trainer.callback_handler.callbacks if isinstance(each, ExportableState)]

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = trainer.state
        return {
            "state": {field.name: getattr(state, field.name) for field in fields(state)},
            "control": {field.name: getattr(trainer.control, field.name) for field in fields(trainer.control)},
            "numbers": {name: getattr(trainer, name) for name in self._NUMBERS},
            "loss": trainer._tr_loss,  # noqa: SLF001 - the Trainer has no public name for it
            "callbacks": [each.state() for each in self._callbacks],
        }

    def load_state_dict(self, values: dict[str, Any]) -> None:
        trainer = self._trainer
        for obj, of in ((trainer.state, "state"), (trainer.control, "control"), (trainer, "numbers")):
            for name, value in values[of].items():
                setattr(obj, name, value)
        trainer._tr_loss = values["loss"]  # noqa: SLF001
        for callback, saved in zip(self._callbacks, values["callbacks"], strict=True):
            for name, value in saved["attributes"].items():
                setattr(callback, name, value)
