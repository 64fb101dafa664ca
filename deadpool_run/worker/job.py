"""The API for training scripts: `init()`, `Job`, `Step`.

The same script runs under plain `python` (a world of one), under `torchrun` (unprotected) and under `deadpool-run`. Only
there the job has a `LoopMember`.
"""

import atexit
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from deadpool_run.core.events import ScriptInitialized
from deadpool_run.errors import ScriptError
from deadpool_run.ids import Version
from deadpool_run.wire.messages import THIS_WORKER
from deadpool_run.worker.check import probe
from deadpool_run.worker.compat import c10d, patches
from deadpool_run.worker.compat.loaders import note_loaders
from deadpool_run.worker.groups import gloo
from deadpool_run.worker.loop.batches import NAME, Batches, refuse_shared
from deadpool_run.worker.loop.member import LoopMember
from deadpool_run.worker.loop.only_loop import OnlyLoop
from deadpool_run.worker.process import session
from deadpool_run.worker.snapshot.checks import check_new
from deadpool_run.worker.state.generators import seed_epoch
from deadpool_run.worker.state.process_settings import use_threads_of_script
from deadpool_run.worker.transcript.rehearsal import REHEARSAL_STEPS
from deadpool_run.worker.verify.script_names import warn

_job: "Job | None" = None


def init(*, timeout: timedelta | None = None, verify: bool = True) -> "Job":
    """Join the job; call it in place of `torch.distributed.init_process_group()`.

    timeout: of each collective, as in `init_process_group`; torch's default if None.
    verify: run one step twice after each start, mostly step 1, from the same state, and stop the job if the results differ:
    a step that is repeated after a loss would not be exact either. `job.rehearsing` is true in the first of the two runs.

    Returns the process's one `Job`, the same at each call. Raises ScriptError if torch.distributed is already initialized.
    """
    global _job  # noqa: PLW0603 - one job a process, as torch.distributed has one default group
    if _job is None:
        if dist.is_initialized():
            raise ScriptError(
                "deadpool_run.init() was called after torch.distributed.init_process_group().\n"
                "Call init() in its place: remove the call of init_process_group()."
            )
        _job = Job(timeout, verify=verify)
    return _job


class Job:
    """A training job, seen from one rank. Made by `init()`."""

    def __init__(self, timeout: timedelta | None, *, verify: bool = True) -> None:
        self._on_rebuild: list[Callable[[], object]] = []
        self._names: set[str] = set()
        self._member: LoopMember | None = None
        self._watch: probe.UnprotectedWatch | None = None
        self._looping = False
        self._batched = False
        self.rebuilds = 0
        """How often this process has rebuilt its communicators. A replacement's first attach counts."""
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            self.device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        if session.under_deadpool():
            worker = session.current()
            use_threads_of_script(worker.threads)
            worker.link.send(ScriptInitialized(THIS_WORKER))
            self._member = LoopMember(worker, timeout, verify=verify)
            self._member.set_up_groups(timeout)
            atexit.register(self._member.close)
            worker.leave = self._leave
        else:
            _init_unprotected(timeout)
            self._watch = probe.watch_unprotected()
        patches.ignore_second_init()
        note_loaders(seed_epoch)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()

    def _leave(self) -> tuple[Version, tuple[Version, ...]]:
        """Tear down this run of the script, before the next. Returns the steps completed and the versions held."""
        global _job  # noqa: PLW0603 - see `init`
        assert self._member is not None
        _job = None
        atexit.unregister(self._member.close)
        return self._member.leave()

    @property
    def rehearsing(self) -> bool:
        """Whether the step is a rehearsal: of a replacement, before a checkpoint is loaded, or to verify the script.

        Do the same work as in any step, but don't write files or logs.
        """
        return self._member is not None and self._member.is_rehearsal

    @property
    def interrupted(self) -> bool:
        """Whether a peer was lost in the running step, which will be repeated: discard its results."""
        return self._member is not None and self._member.step_failed

    @property
    def protected(self) -> bool:
        """Whether a lost rank is replaced: true only under deadpool-run."""
        return self._member is not None

    def protect(self, **objects: object) -> None:
        """Protect the objects whose state makes up a rank: modules, optimizers, anything with a state_dict.

        The global random number generators (python, numpy, torch) are always protected. A protected parameter may change
        only in or after `optimizer.step()`. Raises ScriptError for state that cannot be snapshotted, for a name used twice,
        and for a call inside the step loop.
        """
        if self._looping:
            raise ScriptError(
                f"protect({', '.join(objects)}) was called inside the step loop.\nCall it before job.steps()."
            )
        for name, obj in objects.items():
            if self._member is not None:
                self._member.snapshots.protect(name, obj)
            else:
                check_new(name, obj, self._names)
                self._names.add(name)
                if self._watch is not None:
                    self._watch.protect(name, obj)

    def on_rebuild(self, callback: Callable[[], object]) -> None:
        """Call `callback` on every rank after its communicators were rebuilt, before its next step."""
        self._on_rebuild.append(callback)

    def steps(self, total: int) -> "Iterator[Step]":
        """Return an iterator, for one loop: a `Step` for each step index from the first one not completed up to `total` - 1.

        After a recovery the loop continues at the interrupted step, or at the one before. A replacement first rehearses
        steps 0 and 1. A second loop raises ScriptError.
        """
        return OnlyLoop("steps", self._steps(total))

    def _steps(self, total: int) -> "Iterator[Step]":
        if self._looping:
            raise ScriptError(
                "job.steps() was called twice, and a job has one step loop.\n"
                "Let it count the steps of all epochs: job.steps(EPOCHS * STEPS), or job.batches(loader, epochs=EPOCHS)."
            )
        self._looping = True
        if self._watch is not None:
            yield from self._watch.steps(total, partial(Step, None))
        elif self._member is None:
            yield from (Step(None, index) for index in range(total))
        else:
            yield from probe.watched(self._member, total, self._protected_steps)

    def batches(
        self,
        loader: Iterable[Any],
        *more: Iterable[Any],
        epochs: int | None = None,
        steps: int | None = None,
        replay: bool = False,
    ) -> "Iterator[tuple[Step, Any]]":
        """Return an iterator, for one loop, over each step with its batch: all batches of `epochs` epochs, or `steps` batches.

        With several loaders the batch is a tuple with one of each. Epochs are those of the first; the others begin again when
        they are used up.

        Use it in place of `steps()`. After a recovery the loader continues at the repeated batch: a map-style DataLoader by
        index, without loading the skipped batches; a loader with `state_dict` by itself. Any other loader raises
        ScriptError, unless `replay` allows reading it again from the start of the epoch. Samplers get `set_epoch` calls.
        """
        if (epochs is None) == (steps is None):
            raise ScriptError(
                f"batches() was given {'neither epochs nor steps' if steps is None else 'both epochs and steps'}.\n"
                "Pass one of them: epochs=... or steps=...."
            )
        if self._batched:
            raise ScriptError(
                "job.batches() was called twice, and a job has one step loop.\n"
                "Pass all loaders to one call: for step, (x, y) in job.batches(first, second, epochs=1)."
            )
        self._batched = True
        refuse_shared([loader, *more])
        sources = [Batches(each, replay=replay, number=number) for number, each in enumerate((loader, *more))]
        total = steps if steps is not None else (epochs or 0) * sources[0].per_epoch()
        self.protect(**{f"{NAME}.{at}" if at else NAME: source for at, source in enumerate(sources)})
        return OnlyLoop("batches", self._with_batches(sources, total))

    def _with_batches(self, sources: Sequence[Batches], total: int) -> "Iterator[tuple[Step, Any]]":
        for step in self._steps(total):
            batches = tuple(source.take() for source in sources)
            step.epoch = sources[0].epoch
            yield step, batches if len(batches) > 1 else batches[0]

    def _protected_steps(self, member: LoopMember, total: int) -> "Iterator[Step]":
        member.enter_loop(total)
        if member.rehearsing or member.practising:
            for index in range(min(REHEARSAL_STEPS, total)):
                yield from self._one_step(member, index)
            if member.rehearsing:
                member.join()
                self._rebuilt(member)
            else:
                member.resume()
        while True:
            if member.interrupted:
                member.repair()
                self._rebuilt(member)
            elif not member.begins_step():
                continue
            elif member.begin_trial():
                yield from self._one_step(member, member.completed)
                member.end_trial()
            elif member.completed < total:
                yield from self._one_step(member, member.completed)
            elif member.finish():
                return

    def _one_step(self, member: LoopMember, index: int) -> "Iterator[Step]":
        member.begin_step(index)
        try:
            yield Step(member, index)
        except GeneratorExit:
            member.break_off()
            raise
        member.close_step()

    def _rebuilt(self, member: LoopMember) -> None:
        member.learn_replicas()
        self.rebuilds += 1
        for callback in self._on_rebuild:
            callback()


class Step:
    """One step, as a context manager that handles the loss of a peer at its end."""

    def __init__(self, member: LoopMember | None, index: int) -> None:
        self.index = index
        self.epoch: int | None = None
        """The epoch of the loader of `job.batches`; None in `job.steps`."""
        self._member = member

    def __enter__(self) -> Self:
        """Begin the step."""
        if self._member is not None:
            self._member.enter_step()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End the step; swallow the exception that interrupts it after a loss."""
        return self._member is not None and self._member.exit_step(error)

    def __repr__(self) -> str:
        return f"Step({self.index})"


def _init_unprotected(timeout: timedelta | None) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if os.environ["RANK"] == "0":
            warn(
                "this job does not run under deadpool-run, so a lost rank is not replaced.\n"
                "Start it with deadpool-run in place of torchrun."
            )
        dist.init_process_group(backend, timeout=timeout)
    else:
        c10d.alone(backend, timeout)
    atexit.register(gloo.hold_until_idle, dist.GroupMember.WORLD)
