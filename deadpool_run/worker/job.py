"""What a training script uses: `init()`, `Job`, `Step`.

The same script runs under plain `python` (a world of one), under `torchrun` (its world, unprotected) and under
`deadpool-run`; only there a `LoopMember` stands behind the job.
"""

import atexit
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from deadpool_run.errors import ScriptError
from deadpool_run.wire.messages import Initialized
from deadpool_run.worker.check import probe
from deadpool_run.worker.codec import has_state
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.groups import gloo
from deadpool_run.worker.loop.batches import NAME, Batches
from deadpool_run.worker.loop.member import REHEARSAL_STEPS, LoopMember
from deadpool_run.worker.process import session

_job: "Job | None" = None


def init(*, timeout: timedelta | None = None, verify: bool = True) -> "Job":
    """Join the job; use it in place of `torch.distributed.init_process_group()`.

    timeout: bound of each collective, as `init_process_group` takes it; torch's default if None.
    verify: run a step, mostly step 1, twice on each start, from the same state, and refuse to go on if the results differ: a step that is
    repeated after a loss would then not be exact either. `job.rehearsing` is true in the first of the two runs.

    Returns the process's one `Job`, the same at each call. Raises ScriptError if torch.distributed was initialized
    before by other means.
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
        self._looping = False
        self._rebuilds = 0
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        if torch.cuda.is_available():
            self.device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        else:
            self.device = torch.device("cpu")
        if session.under_deadpool():
            worker = session.current()
            worker.link.send(Initialized())
            self._member = LoopMember(worker, timeout, verify=verify)
            self._member.set_up_groups(timeout)
            atexit.register(self._member.close)
            worker.leave = self._leave
        else:
            _init_unprotected(timeout)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.local_rank = local_rank

    def _leave(self) -> tuple[int, list[int]]:
        """Take down what this run of the script made: another begins. Returns the steps done and the versions held."""
        global _job  # noqa: PLW0603 - see `init`
        assert self._member is not None
        _job = None
        atexit.unregister(self._member.close)
        return self._member.leave()

    @property
    def rehearsing(self) -> bool:
        """Whether a step is run for practice: by a replacement, before a checkpoint is loaded, or to verify it.

        Do the same work, but write no files now.
        """
        member = self._member
        return member is not None and (member.rehearsing or member.practising or member.trial.running)

    @property
    def interrupted(self) -> bool:
        """Whether a peer was lost in the running step, which will be repeated: keep nothing that it came to."""
        return self._member is not None and self._member.step_failed

    @property
    def protected(self) -> bool:
        """Whether a lost rank is replaced: True under deadpool-run only."""
        return self._member is not None

    @property
    def rebuilds(self) -> int:
        """How often this process's communicators have been rebuilt (a replacement's first attach counts)."""
        return self._rebuilds

    def protect(self, **objects: object) -> None:
        """Name the objects whose state makes up a rank: modules, optimizers, anything with a state_dict.

        Random number generators (python, numpy, torch) are protected without asking. A protected parameter may change
        only in or after `optimizer.step()`. Raises ScriptError for state that no snapshot could hold, a name used twice,
        or a call from within the step loop.
        """
        if self._looping:
            raise ScriptError(
                f"protect({', '.join(objects)}) was called inside the step loop.\nCall it before job.steps()."
            )
        for name, obj in objects.items():
            if name in self._names:
                raise ScriptError(f"protect(): the name {name!r} is taken.\nGive each object a name of its own.")
            if not has_state(obj) and not isinstance(obj, torch.Generator):
                raise ScriptError(
                    f"protect(): {name}={type(obj).__name__} has no state_dict() and load_state_dict().\n"
                    "Give it both, or keep its state in an object that has them."
                )
            self._names.add(name)
            if self._member is not None:
                self._member.snapshots.protect(name, obj)

    def on_rebuild(self, callback: Callable[[], object]) -> None:
        """Call this on every rank after its communicators were rebuilt, before its next step."""
        self._on_rebuild.append(callback)

    def steps(self, total: int) -> "Iterator[Step]":
        """Yield a `Step` for each step index from the first one not yet done to `total` - 1.

        After a recovery the index goes on where training does: at the interrupted step, or the one before. A replacement
        first plays steps 0 and 1 as rehearsal. Raises ScriptError if a second loop is begun.
        """
        if self._looping:
            raise ScriptError("job.steps() was called twice.\nUse one step loop; nest others inside its steps.")
        self._looping = True
        if self._member is None:
            yield from (Step(self, index) for index in range(total))
        else:
            yield from probe.watched(self._member, total, self._protected_steps)

    def batches(
        self, loader: Iterable[Any], *, epochs: int | None = None, steps: int | None = None, replay: bool = False
    ) -> "Iterator[tuple[Step, Any]]":
        """Yield each step with its batch: `epochs` times all of a loader, or `steps` batches of as many epochs as it takes.

        In place of `steps()`. After a recovery the loader is put back: a map-style DataLoader by index, without loading
        what is skipped; one with `state_dict` by itself; any other is refused, unless `replay` allows to read it again
        from the beginning of the epoch. Samplers are told the epoch. Raises ScriptError.
        """
        if (epochs is None) == (steps is None):
            raise ScriptError("batches() takes either epochs=... or steps=....\nGive one of them.")
        source = Batches(loader, replay=replay)
        total = steps if steps is not None else (epochs or 0) * source.per_epoch()
        self.protect(**{NAME: source})
        return self._with_batches(source, total)

    def _with_batches(self, source: Batches, total: int) -> "Iterator[tuple[Step, Any]]":
        for step in self.steps(total):
            batch = source.take()
            step.epoch = source.epoch
            yield step, batch

    def _protected_steps(self, member: LoopMember, total: int) -> "Iterator[Step]":
        member.enter_loop()
        if member.rehearsing:
            for index in range(min(REHEARSAL_STEPS, total)):
                yield from self._one_step(member, index)
            member.join()
            self._rebuilt(member)
        elif member.practising:
            for index in range(min(REHEARSAL_STEPS, total)):
                yield from self._one_step(member, index)
            member.go_on()
        while True:
            if member.interrupted:
                member.repair()
                self._rebuilt(member)
            elif member.begin_trial(total):
                yield from self._one_step(member, member.completed)
                member.end_trial()
            elif member.completed < total:
                yield from self._one_step(member, member.completed)
            elif member.finish():
                return

    def _one_step(self, member: LoopMember, index: int) -> "Iterator[Step]":
        member.begin_step(index)
        try:
            yield Step(self, index)
        except GeneratorExit:
            member.break_off()
            raise
        member.close_step()

    def _rebuilt(self, member: LoopMember) -> None:
        member.learn_replicas()
        self._rebuilds += 1
        for callback in self._on_rebuild:
            callback()


class Step:
    """One step, as a context manager: a peer lost within is handled at its end."""

    def __init__(self, job: Job, index: int) -> None:
        self.index = index
        self.epoch: int | None = None
        """How many times the loader of `job.batches` was used up before; None in `job.steps`."""
        self._job = job

    def __enter__(self) -> Self:
        """Begin."""
        if self._job._member is not None:  # noqa: SLF001 - same module
            self._job._member.enter_step()  # noqa: SLF001 - same module
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """End; swallow what only says that the step was interrupted."""
        member = self._job._member  # noqa: SLF001 - same module
        return member is not None and member.exit_step(error)

    def __repr__(self) -> str:
        return f"Step({self.index})"


def _init_unprotected(timeout: timedelta | None) -> None:
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if os.environ["RANK"] == "0":
            warnings.warn(
                "this job does not run under deadpool-run: a lost rank will not be replaced",
                RuntimeWarning,
                stacklevel=4,
            )
        dist.init_process_group(backend, timeout=timeout)
    else:
        c10d.alone(backend, timeout)
    atexit.register(gloo.hold_until_idle, dist.GroupMember.WORLD)
