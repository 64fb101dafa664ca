"""The worker's part of `deadpool-run check`: fewer steps, digests of each version's state, and one death.

Without the environment variable `DEADPOOL_CHECK` the step loop is not changed.
"""

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deadpool_run.errors import ProtocolError
from deadpool_run.wire import typed
from deadpool_run.wire.check import FAULT_FILE, LOOP_FILE, VARIABLE, CheckPlan, Fault, FaultPhase
from deadpool_run.worker.loop.member import LoopMember

CHEAP_BYTES = 1 << 29
"""State up to this size is hashed at every version; N times as much at every Nth version."""

_LATE = 0.5
"""In the phase between two steps, a rank with a smaller fraction dies before the ended step is counted, others after."""


def watched(member: LoopMember, total: int, steps: Callable[[LoopMember, int], Iterator[Any]]) -> Iterator[Any]:
    """Return the step loop; under `deadpool-run check` a shorter loop with digests and a death."""
    text = os.environ.get(VARIABLE)
    if text is None:
        return steps(member, total)
    try:
        plan = typed.Decoder[CheckPlan](CheckPlan, "a plan of deadpool-run check").decode(os.fsencode(text))
    except ProtocolError as error:
        raise ProtocolError(f"{VARIABLE}: {error}\nUnset {VARIABLE}.") from error
    return _Watch(member, plan, min(total, plan.steps)).run(total, steps)


class _Watch:
    """One run of the step loop."""

    def __init__(self, member: LoopMember, plan: CheckPlan, limit: int) -> None:
        from deadpool_run.worker.check.states import States  # noqa: PLC0415 - only a check needs it

        self._member = member
        self._plan = plan
        self._limit = limit
        self._states = States(member.snapshots)
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
        """Write the digests of this version's state, unless the state is too large to hash each time."""
        stride = max(1, -(-self._states.nbytes() // CHEAP_BYTES))
        if version % stride and version != self._limit:
            return
        session = self._member.session
        line = json.dumps({"version": version, "digests": self._states.digests()}) + "\n"
        with self._plan.states_file(session.rank, session.worker).open("a", encoding="utf-8") as file:
            file.write(line)

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
