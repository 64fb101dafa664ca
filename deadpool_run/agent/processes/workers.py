"""The worker processes of this node: ordered, assigned ranks, sent messages, ended. Decides nothing."""

import contextlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from signal import SIGCONT, SIGKILL, SIGSTOP

from msgspec.structs import replace

from deadpool_run.agent.processes.children import Exit, Process
from deadpool_run.agent.processes.controlled_process import ControlledProcess
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.slowdown import Slowdown
from deadpool_run.core.events import Event, WorkerExited, WorkerStarted, WorkerStartFailed
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import Rank, Version, WorkerId
from deadpool_run.wire.messages import (
    Assign,
    Captured,
    Dismiss,
    ExitNow,
    HangNow,
    Message,
    ScriptTraceback,
    Stop,
    WorkerReport,
)

_FOR_THE_PARKED = (Dismiss, ExitNow, HangNow, Stop)


@dataclass(slots=True)
class _Worker:
    child: ControlledProcess
    rank: Rank | None = None
    local_rank: int = 0
    awaits_rank: bool = False
    held: list[Message] = field(default_factory=list)  # for when it has its rank
    slowdown: Slowdown | None = None

    def end_slowdown(self) -> None:
        """Let it run at its own speed."""
        if self.slowdown is not None:
            self.slowdown.close()
            self.slowdown = None


@dataclass(eq=False)
class Workforce:
    """The living workers by id. Submits what happens to them as events."""

    forkserver: ForkServer
    submit: Callable[[Event], None]
    captured: Callable[[Rank], tuple[Version, ...]]
    """Returns what a dead worker's rank has captured."""
    on_captured: Callable[[Rank, Version], None]
    """Takes each new snapshot, where workers report them (`DEADPOOL_REPLICATE=1`)."""
    on_traceback: Callable[[str], None] = lambda _: None
    """Takes the traceback of a script whose stderr is the console."""
    _workers: dict[WorkerId, _Worker] = field(default_factory=dict)
    _suspended: bool = False

    def pid(self, worker: WorkerId) -> int | None:
        """Return the process of a living worker."""
        found = self._workers.get(worker)
        return None if found is None or found.child.process is None else found.child.process.pid

    def ranks(self) -> list[Rank]:
        """Return the ranks of living workers."""
        return [worker.rank for worker in self._workers.values() if worker.rank is not None]

    def processes(self) -> Iterator[tuple[Rank, int, int]]:
        """Yield rank, local rank and process of each living worker that has a rank."""
        for worker in self._workers.values():
            if worker.rank is not None and worker.child.process is not None:
                yield worker.rank, worker.local_rank, worker.child.process.pid

    def rank(self, worker: WorkerId) -> Rank | None:
        """Return the rank of a living worker."""
        found = self._workers.get(worker)
        return None if found is None else found.rank

    def start(self, worker: WorkerId) -> None:
        """Order a process, which parks."""
        child = ControlledProcess(
            "worker",
            on_started=lambda: self._started(worker),
            on_message=lambda message: self._handle(worker, message),
            on_failed=lambda why: self._start_failed(worker, why),
            on_ended=lambda end: self._ended(worker, end),
        )
        self._workers[worker] = _Worker(child)
        self.forkserver.fork(child)

    def expect_rank(self, worker: WorkerId) -> None:
        """Hold back messages to the worker until `assign`."""
        if found := self._workers.get(worker):
            found.awaits_rank = True

    def assign(self, worker: WorkerId, order: Assign, fds: Mapping[str, int]) -> None:
        """Assign the worker the rank of this order, or have it rehearse, with the descriptors that the order names."""
        found = self._workers.get(worker)
        if found is None or found.child.channel is None:
            return
        found.child.channel.send(order, [fds[name] for name in order.fds])
        if order.prepare:
            return
        found.rank, found.local_rank = Rank(order.rank), order.local_rank
        found.awaits_rank = False
        for message in found.held:
            found.child.channel.send(message)
        found.held.clear()

    def bind(self, worker: WorkerId, cpus: Collection[int]) -> None:
        """Bind a parked worker, and the threads that it starts, to these CPUs."""
        pid = self.pid(worker)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(pid, cpus)

    def send(self, worker: WorkerId, message: Message) -> None:
        """Send a message to the worker, unless it has ended."""
        found = self._workers.get(worker)
        if found is None or found.child.channel is None:
            return
        if found.awaits_rank and not isinstance(message, _FOR_THE_PARKED):
            found.held.append(message)
        else:
            found.child.channel.send(message)

    def slow(self, worker: WorkerId, factor: float, for_s: float) -> None:
        """Slow the worker's process for a time. Another order for it takes the place of the first."""
        if process := self._process(worker):
            found = self._workers[worker]
            found.end_slowdown()
            found.slowdown = Slowdown(process, factor, for_s, lambda: self._suspended)

    def signal(self, worker: WorkerId, number: int) -> None:
        """Send a signal to the worker's process."""
        if process := self._process(worker):
            self._workers[worker].end_slowdown()
            process.signal(number)

    def terminate(self, worker: WorkerId, number: int, grace_s: float) -> None:
        """Send a signal to the worker's group, SIGKILL after the grace."""
        if process := self._process(worker):
            self._workers[worker].end_slowdown()
            process.signal_group(number)
            process.kill_after(grace_s)

    def dismiss(self, worker: WorkerId, grace_s: float) -> None:
        """Ask a parked worker to end."""
        if process := self._process(worker):
            self.send(worker, Dismiss())
            process.kill_after(grace_s)

    def abandon(self, worker: WorkerId) -> None:
        """Report the end of a worker that was killed and does not end, and forget it."""
        if worker in self._workers:
            self._ended(worker, Exit(None, SIGKILL))

    def suspend(self) -> None:
        """Stop every worker with SIGSTOP, with all that it started, also one that is being started."""
        self._suspended = True
        self._signal_all(SIGSTOP)

    def resume(self) -> None:
        """Let the stopped workers go on."""
        self._suspended = False
        self._signal_all(SIGCONT)

    def close(self) -> None:
        """End every process at once. Their exits are still reaped by the loop."""
        for worker in self._workers.values():
            worker.end_slowdown()
            worker.child.kill()

    def _signal_all(self, number: int) -> None:
        for worker in list(self._workers.values()):  # another thread may call this
            if worker.child.process is not None:
                worker.child.process.signal_group(number)

    def _process(self, worker: WorkerId) -> Process | None:
        """Return the process of a living worker. If it does not exist yet, have it killed then."""
        found = self._workers.get(worker)
        if found is not None and found.child.process is None:
            found.child.kill()
        return None if found is None else found.child.process

    def _started(self, worker: WorkerId) -> None:
        process = self._workers[worker].child.process
        assert process is not None
        if self._suspended:
            process.signal_group(SIGSTOP)
        self.submit(WorkerStarted(worker, process.pid))

    def _handle(self, worker: WorkerId, message: Message) -> None:
        if isinstance(message, WorkerReport):
            self.submit(replace(message, worker=worker))
        elif isinstance(message, ScriptTraceback):
            self.on_traceback(message.text)
        elif not isinstance(message, Captured):
            raise ProtocolError(f"worker {worker} sent {type(message).__name__}, which no worker may send")
        elif (rank := self._workers[worker].rank) is not None:
            self.on_captured(rank, Version(message.version))

    def _start_failed(self, worker: WorkerId, why: str) -> None:
        del self._workers[worker]
        self.submit(WorkerStartFailed(worker, why))

    def _ended(self, worker: WorkerId, end: Exit) -> None:
        found = self._workers.pop(worker, None)
        if found is None:
            return  # it was abandoned
        found.end_slowdown()
        captured = () if found.rank is None else self.captured(found.rank)
        self.submit(WorkerExited(worker, end.code, end.signal, captured))
