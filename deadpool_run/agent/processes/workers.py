"""The worker processes of this node: made, given ranks, spoken to, ended. Decides nothing."""

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from deadpool_run.agent.processes.children import Exit, Process
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.worker_channel import WorkerChannel
from deadpool_run.agent.processes.worker_events import to_event
from deadpool_run.core.events import Event, WorkerExited, WorkerStarted, WorkerStartFailed
from deadpool_run.ids import Rank, Version, WorkerId
from deadpool_run.wire.messages import Assign, Captured, Dismiss, ExitNow, Message, Stop

Submit = Callable[[Event], None]
_FOR_THE_PARKED = (ExitNow, Stop)


@dataclass(slots=True)
class _Worker:
    ours: socket.socket | None = None  # our end of the control socket until there is a process
    process: Process | None = None
    channel: WorkerChannel | None = None
    rank: Rank | None = None
    awaits_rank: bool = False
    held: list[Message] = field(default_factory=list)  # for when it has its rank
    doomed: bool = False  # to be ended as soon as it exists


class Workforce:
    """Every living worker by its id. What happens to them is submitted as events."""

    def __init__(
        self,
        forkserver: ForkServer,
        submit: Submit,
        captured: Callable[[Rank], tuple[Version, ...]],
        on_captured: Callable[[Rank, Version], None] | None = None,
    ) -> None:
        """Read what a dead worker's rank has captured by `captured`.

        `on_captured` is told each snapshot that a worker has just made, where workers say so (`DEADPOOL_REPLICATE=1`).
        """
        self._forkserver = forkserver
        self._submit = submit
        self._captured = captured
        self._on_captured = on_captured
        self._workers: dict[WorkerId, _Worker] = {}

    def pid(self, worker: WorkerId) -> int | None:
        """Return the process of a living worker."""
        found = self._workers.get(worker)
        return None if found is None or found.process is None else found.process.pid

    def ranks(self) -> list[Rank]:
        """Return the ranks that living workers were given."""
        return [worker.rank for worker in self._workers.values() if worker.rank is not None]

    def rank(self, worker: WorkerId) -> Rank | None:
        """Return the rank that a living worker was given."""
        found = self._workers.get(worker)
        return None if found is None else found.rank

    def start(self, worker: WorkerId) -> None:
        """Have a process made that parks."""
        new = _Worker()
        self._workers[worker] = new

        def make_fds() -> list[int]:
            if new.ours is not None:
                new.ours.close()
            new.ours, theirs = socket.socketpair()
            return [theirs.detach()]

        self._forkserver.fork(
            "worker",
            make_fds,
            lambda process: self._started(worker, process),
            lambda why: self._start_failed(worker, why),
            lambda end: self._ended(worker, end),
        )

    def expect_rank(self, worker: WorkerId) -> None:
        """Hold back what is said to the rank's owner until `assign`: whatever that waits for, it is to be first."""
        if found := self._workers.get(worker):
            found.awaits_rank = True

    def assign(self, worker: WorkerId, order: Assign, fds: Mapping[str, int]) -> None:
        """Give the worker the rank of this order, with the descriptors that it names."""
        found = self._workers.get(worker)
        if found is not None and found.channel is not None:
            found.rank = Rank(order.rank)
            found.awaits_rank = False
            found.channel.send(order, [fds[name] for name in order.fds])
            for message in found.held:
                found.channel.send(message)
            found.held.clear()

    def bind(self, worker: WorkerId, cpus: Collection[int]) -> None:
        """Have a parked worker, and the threads that it starts, run on these CPUs only."""
        pid = self.pid(worker)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(pid, cpus)

    def prepare(self, worker: WorkerId, order: Assign, fds: Mapping[str, int]) -> None:
        """Have the worker rehearse as the rank of this order, which it is not given."""
        found = self._workers.get(worker)
        if found is not None and found.channel is not None:
            found.channel.send(order, [fds[name] for name in order.fds])

    def send(self, worker: WorkerId, message: Message) -> None:
        """Say something to the worker; nothing happens if it has ended."""
        found = self._workers.get(worker)
        if found is None or found.channel is None:
            return
        if found.awaits_rank and not isinstance(message, _FOR_THE_PARKED):
            found.held.append(message)
        else:
            found.channel.send(message)

    def signal(self, worker: WorkerId, number: int) -> None:
        """Send a signal to the worker's process."""
        if found := self._workers.get(worker):
            if found.process is None:
                found.doomed = True
            else:
                found.process.signal(number)

    def terminate(self, worker: WorkerId, number: int, grace_s: float) -> None:
        """Send a signal to the worker's group, SIGKILL after the grace."""
        if found := self._workers.get(worker):
            if found.process is None:
                found.doomed = True
            else:
                found.process.terminate(number, grace_s)

    def dismiss(self, worker: WorkerId, grace_s: float) -> None:
        """Ask a parked worker to end."""
        if found := self._workers.get(worker):
            if found.process is None or found.channel is None:
                found.doomed = True
            else:
                found.channel.send(Dismiss())
                found.process.kill_after(grace_s)

    def close(self) -> None:
        """End every process at once. Their exits are still reaped by the loop."""
        for worker in self._workers.values():
            worker.doomed = True
            if worker.process is not None:
                worker.process.signal_group(signal.SIGKILL)

    def _started(self, worker: WorkerId, process: Process) -> None:
        found = self._workers[worker]
        assert found.ours is not None
        found.process = process
        found.channel = WorkerChannel(
            found.ours,
            lambda message: self._heard(worker, message),
            lambda _: process.signal_group(signal.SIGKILL),  # deaf or confused: its death is repaired as any other
        )
        found.ours = None
        if found.doomed:
            process.signal_group(signal.SIGKILL)
        self._submit(WorkerStarted(worker, process.pid))

    def _heard(self, worker: WorkerId, message: Message) -> None:
        if not isinstance(message, Captured):
            self._submit(to_event(worker, message))
            return
        rank = self._workers[worker].rank
        if rank is not None and self._on_captured is not None:
            self._on_captured(rank, Version(message.version))

    def _start_failed(self, worker: WorkerId, why: str) -> None:
        found = self._workers.pop(worker)
        if found.ours is not None:
            found.ours.close()
        self._submit(WorkerStartFailed(worker, why))

    def _ended(self, worker: WorkerId, end: Exit) -> None:
        found = self._workers[worker]
        if found.channel is not None:
            found.channel.read_rest()  # what it said last comes before its end
            found.channel.close()
        del self._workers[worker]
        captured = () if found.rank is None else self._captured(found.rank)
        self._submit(WorkerExited(worker, end.code, end.signal, captured))
