"""Hugging Face's `Accelerator` as a protected job: see docs/frameworks.md.

A step of the job is one update of the optimizer with all its micro-batches.
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from accelerate import Accelerator
from accelerate.utils import send_to_device, synchronize_rng_states

import deadpool_run as deadpool
from deadpool_run.integrations.seekable import SeekableLoader


def updates(accelerator: Accelerator, loader: Any, epochs: int) -> Iterator[tuple[deadpool.Step, Iterator[Any]]]:
    """Yield each update's step and its micro-batches, on the accelerator's device, epoch after epoch.

    `loader` comes from `accelerator.prepare`. All prepared objects, and those of `register_for_checkpointing`, are
    protected. Raises ScriptError if `deadpool_run.init()` was not called first.
    """
    job = deadpool.init()
    if loader.rng_types:
        synchronize_rng_states(loader.rng_types, loader.synchronized_generator)  # as at the start of each of its epochs
    batches = SeekableLoader(loader)
    accumulated = accelerator.gradient_accumulation_steps
    per_epoch = math.ceil(len(batches) / accumulated)
    _protect(job, accelerator, batches)
    place, rest, rebuilds = (-1, 0), iter(()), 0
    for step in job.steps(epochs * per_epoch):
        epoch, update = divmod(step.index, per_epoch)
        count = min(accumulated, len(batches) - update * accumulated)
        if place != (epoch, update) or job.rebuilds != rebuilds:
            rest = batches.at(epoch, update * accumulated)
        rebuilds = job.rebuilds
        yield step, _micro_batches(accelerator, rest, count)
        place = (epoch, update + 1)


def _micro_batches(accelerator: Any, rest: Iterator[Any], count: int) -> Iterator[Any]:
    """Yield one update's batches. Each is loaded in its step, and the last one synchronizes the gradients."""
    for number, batch in enumerate(islice(rest, count)):
        accelerator.step = accelerator.gradient_accumulation_steps - 1 if number == count - 1 else 0
        yield send_to_device(batch, accelerator.device)


def _protect(job: deadpool.Job, accelerator: Any, batches: SeekableLoader) -> None:
    job.protect(batches=batches)
    for kind, found in (
        ("model", accelerator._models),  # noqa: SLF001 - accelerate has no public names for these
        ("optimizer", [each.optimizer for each in accelerator._optimizers]),  # noqa: SLF001
        ("scheduler", [each.scheduler for each in accelerator._schedulers]),  # noqa: SLF001
        ("object", accelerator._custom_objects),  # noqa: SLF001
        ("scaler", [accelerator.scaler] if accelerator.scaler is not None else []),
    ):
        job.protect(**{f"{kind}{number}": obj for number, obj in enumerate(found)})
