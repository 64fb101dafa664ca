"""The worker's part of `deadpool-run check`: fewer steps, digests of each version's state, and one death.

Without the environment variable `DEADPOOL_CHECK` the step loop is not changed. A check also runs the script with torchrun, where
no rank is protected: there is only the state to write.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from deadpool_run.errors import ProtocolError
from deadpool_run.wire import typed
from deadpool_run.wire.check import FAULT_FILE, LOOP_FILE, VARIABLE, CheckPlan, Fault, FaultPhase
from deadpool_run.worker.loop.member import LoopMember
from deadpool_run.worker.state.protected import Protected

if TYPE_CHECKING:
    from deadpool_run.worker.check.states import States

CHEAP_BYTES = 1 << 29
"""State up to this size is hashed at every version; N times as much at every Nth version."""

_LATE = 0.5
"""In the phase between two steps, a rank with a smaller fraction dies before the ended step is counted, others after."""


_Step = TypeVar("_Step")


def watched(member: LoopMember, total: int, steps: Callable[[LoopMember, int], Iterator[Any]]) -> Iterator[Any]:
    """Return the step loop; under `deadpool-run check` a shorter loop with digests and a death."""
    plan = _plan()
    return steps(member, total) if plan is None else _Watch(member, plan, min(total, plan.steps)).run(total, steps)


def watch_unprotected() -> "UnprotectedWatch | None":
    """Return the watch of a job without deadpool-run; None if no check runs it."""
    plan = _plan()
    return None if plan is None else UnprotectedWatch(plan)


def _plan() -> CheckPlan | None:
    """Return the plan of this run. Raises `ProtocolError` if it cannot be read."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    try:
        return typed.Decoder[CheckPlan](CheckPlan, "a plan of deadpool-run check").decode(os.fsencode(text))
    except ProtocolError as error:
        raise ProtocolError(f"{VARIABLE}: {error}\nUnset {VARIABLE}.") from error


class UnprotectedWatch:
    """The state of a rank without deadpool-run, written at each step of a shorter loop."""

    def __init__(self, plan: CheckPlan) -> None:
        self._plan = plan
        self._protected = Protected()

    def protect(self, name: str, obj: object) -> None:
        """Add an object whose state is to be written."""
        self._protected.add(name, obj)

    def steps(self, total: int, step: Callable[[int], _Step]) -> Iterator[_Step]:
        """Yield the steps."""
        from deadpool_run.worker.check.states import States  # noqa: PLC0415 - only a check needs it

        limit = min(total, self._plan.steps)
        states = States(self._protected)
        recorder = _Recorder(self._plan, states, limit)
        try:
            for index in range(limit + 1):
                self._protected.refresh(final=False)  # the script may have put others in the places of some
                recorder.record(index, dist.get_rank(), worker=0)
                if index < limit:
                    yield step(index)
        finally:
            states.close()


class _Recorder:
    """The file of states of a rank."""

    def __init__(self, plan: CheckPlan, states: "States", limit: int) -> None:
        """`limit`: steps of the loop."""
        self._plan = plan
        self._states = states
        self._limit = limit

    def record(self, version: int, rank: int, worker: int) -> None:
        """Write the digests of this version's state, unless the state is too large to hash each time."""
        stride = max(1, -(-self._states.nbytes() // CHEAP_BYTES))
        if version % stride and version != self._limit:
            return
        line = json.dumps({"version": version, "digests": self._states.digests()}) + "\n"
        with self._plan.states_file(rank, worker).open("a", encoding="utf-8") as file:
            file.write(line)


class _Watch:
    """One run of the step loop."""

    def __init__(self, member: LoopMember, plan: CheckPlan, limit: int) -> None:
        from deadpool_run.worker.check.states import States  # noqa: PLC0415 - only a check needs it

        self._member = member
        self._plan = plan
        self._limit = limit
        snapshots = member.snapshots
        self._states = States(snapshots.protected, lambda: snapshots.values.get("gradients", ()))
        self._recorder = _Recorder(plan, self._states, limit)
        self._issued = 0  # this rank's collectives before the running step

    def run(self, total: int, steps: Callable[[LoopMember, int], Iterator[Any]]) -> Iterator[Any]:
        if self._member.session.rank == 0 and not self._member.is_rehearsal:
            about = {"script_steps": total, "steps": self._limit}
            Path(self._plan.folder, LOOP_FILE).write_text(json.dumps(about), encoding="utf-8")
        inner = steps(self._member, self._limit)
        death: _Death | None = None
        try:
            for step in inner:
                if not self._member.is_rehearsal:
                    self._record(step.index)
                    death = self._prepare(step.index)
                yield step
                if death is not None:
                    death.step_is_over(step.index, last=step.index + 1 >= self._limit)
            self._record(self._limit)
        finally:
            inner.close()  # type: ignore[attr-defined] # it is a generator
            self._states.close()

    def _record(self, version: int) -> None:
        session = self._member.session
        self._recorder.record(version, session.rank, session.worker)

    def _prepare(self, index: int) -> "_Death | None":
        fault, issued = self._plan.fault, self._issued
        self._issued = self._member._rank_entry.issued  # noqa: SLF001 - a counter that nothing else reads
        file = Path(self._plan.folder, FAULT_FILE)
        if fault is None or fault.rank != self._member.session.rank or index < fault.step or file.exists():
            return None
        death = _Death(file, fault)
        if index == fault.step:
            death.prepare(self._states.modules(), max(0, self._issued - issued))
        elif fault.phase is FaultPhase.BETWEEN:  # the step is counted, and the next one has not begun
            death.die()
        return death


@dataclass(frozen=True, slots=True)
class _Death:
    """The planned death of a rank's process, once per run."""

    file: Path
    fault: Fault

    def prepare(self, modules: int, collectives: int) -> None:
        """Make the process die when it reaches the phase."""
        from deadpool_run.worker.check import phases  # noqa: PLC0415 - only a death needs it

        fault = self.fault
        if fault.phase is FaultPhase.FORWARD:
            phases.in_forward(self.die, int(fault.fraction * modules))
        elif fault.phase is FaultPhase.BACKWARD:
            phases.in_backward(self.die, fault.fraction)
        elif fault.phase is FaultPhase.COLLECTIVE:
            phases.in_collective(self.die, int(fault.fraction * collectives))
        elif fault.phase is FaultPhase.OPTIMIZER:
            phases.in_optimizer(self.die, fault.fraction)
        elif fault.phase is FaultPhase.CAPTURE:
            phases.in_capture(self.die, fault.step)

    def step_is_over(self, index: int, *, last: bool) -> None:
        """Die when the script asks for the next step, if that is the phase, or if the phase was not reached."""
        fault = self.fault
        if fault.phase is FaultPhase.CAPTURE:
            waits = not last  # the copy starts after this, with a longer interval even after a later step
        else:
            waits = fault.phase is FaultPhase.BETWEEN and index == fault.step and fault.fraction >= _LATE and not last
        if not waits:
            self.die(met=fault.phase is FaultPhase.BETWEEN)

    def die(self, *, met: bool = True) -> None:
        try:
            fd = os.open(self.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return
        os.write(fd, json.dumps({"met": met, "pid": os.getpid()}).encode())
        os.close(fd)
        os.kill(os.getpid(), signal.SIGKILL)
