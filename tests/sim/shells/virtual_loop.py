"""Event loops in virtual time, one for each process. So one process can pause, end or be late while others continue.

A loop is asyncio's, except for its waits: it uses the simulation's clock, its selector knows only simulated sockets, and
its executor calls functions in the loop itself, a little later.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from machine import Clock

if TYPE_CHECKING:
    from network import Machine, SimSocket

_TURN_S = 5e-6
"""The time that one turn of a loop takes."""
_MAX_TURNS = 20_000
"""The most turns of loops in a row without another event. More turns mean an endless loop."""


class _Task(asyncio.Task[Any]):
    """A task whose hash does not depend on its address, so that sets keep their order in each run."""

    def __init__(self, coroutine: Any, *, loop: VirtualLoop, **options: Any) -> None:
        loop.tasks_made += 1
        self._number = loop.tasks_made
        super().__init__(coroutine, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop of one process."""

    def __init__(self, name: str, machine: Machine, clock: Clock, rng: random.Random) -> None:
        super().__init__()
        self.name, self.machine = name, machine
        self._clock_now, self._rng = clock, rng
        self._skew = machine.skew
        self._selector = self
        self.tasks_made = 0
        self.set_task_factory(lambda loop, coroutine, **options: _Task(coroutine, loop=loop, **options))
        self.ended = False
        """Whether the process was killed."""
        self._readers: dict[SimSocket, asyncio.Handle] = {}
        self._writers: dict[SimSocket, asyncio.Handle] = {}

    def time(self) -> float:
        return self._clock_now.now + self._skew

    # --- for the scheduler ---------------------------------------------------------------------------------------

    @property
    def runs(self) -> bool:
        return not self.ended and self.machine.runs

    def is_due(self) -> bool:
        """Tell whether a turn would run a callback."""
        if self._ready or any(sock.readable for sock in self._readers) or any(sock.writable for sock in self._writers):
            return True
        due = self.due_at()
        return due is not None and due <= self._clock_now.now + self._clock_resolution

    def due_at(self) -> float | None:
        """Return when the next timer fires, by the simulation's clock."""
        while self._scheduled and self._scheduled[0].cancelled():
            self._timer_cancelled_count -= 1
            heapq.heappop(self._scheduled)._scheduled = False
        return self._scheduled[0].when() - self._skew if self._scheduled else None

    def turn(self) -> None:
        asyncio._set_running_loop(self)
        try:
            self._run_once()
        finally:
            asyncio._set_running_loop(None)

    def inside(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function as a callback of this loop."""
        asyncio._set_running_loop(self)
        try:
            return call(*arguments)
        finally:
            asyncio._set_running_loop(None)

    def bury(self) -> None:
        """Run the tasks of an ended process to their end without effects, so that none is destroyed while pending."""
        self.ended = True
        alone = Clock()
        alone.now = self._clock_now.now
        self._clock_now = alone
        for _ in range(_MAX_TURNS):
            self._readers.clear()  # all sockets are closed
            self._writers.clear()
            for task in asyncio.all_tasks(self):
                task.cancel()
            while self.is_due():
                self.turn()
            if not asyncio.all_tasks(self):
                break
            alone.now = max(alone.now, self.due_at() or alone.now)
        else:
            raise AssertionError(f"tasks of {self.name} do not end: {asyncio.all_tasks(self)}")
        self.close()

    # --- asyncio's selector --------------------------------------------------------------------------------------

    def select(self, _timeout: float | None) -> list[asyncio.Handle]:
        found = [handle for sock, handle in self._readers.items() if sock.readable]
        return found + [handle for sock, handle in self._writers.items() if sock.writable]

    def _process_events(self, event_list: list[asyncio.Handle]) -> None:
        self._ready.extend(event_list)

    def _write_to_self(self) -> None:
        pass

    # --- sockets -------------------------------------------------------------------------------------------------

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        sock = self._sock(fd)
        assert not sock.closed, "a closed socket is registered"
        self._readers[sock] = asyncio.Handle(callback, args, self, None)

    def remove_reader(self, fd: Any) -> bool:
        return _cancelled(self._readers.pop(self._sock(fd), None))

    def add_writer(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        sock = self._sock(fd)
        assert not sock.closed, "a closed socket is registered"
        self._writers[sock] = asyncio.Handle(callback, args, self, None)

    def remove_writer(self, fd: Any) -> bool:
        return _cancelled(self._writers.pop(self._sock(fd), None))

    def _sock(self, fd: Any) -> SimSocket:
        """Return the socket of a descriptor, or the socket itself."""
        return next(sock for sock in self.machine.sockets if sock.number == fd) if isinstance(fd, int) else fd

    async def sock_connect(self, sock: Any, address: tuple[str, int]) -> None:
        sock.connect(address)
        while sock.connecting:
            await self._when(self.add_writer, self.remove_writer, sock)
        sock.raise_error()

    async def sock_sendall(self, sock: Any, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[sock.send(rest) :]
            except BlockingIOError:
                await self._when(self.add_writer, self.remove_writer, sock)

    async def sock_recv(self, sock: Any, nbytes: int) -> bytes:
        while True:
            try:
                return bytes(sock.recv(nbytes))
            except BlockingIOError:
                await self._when(self.add_reader, self.remove_reader, sock)

    async def _when(self, add: Callable[..., None], remove: Callable[[Any], bool], sock: Any) -> None:
        ready = self.create_future()
        add(sock, lambda: ready.done() or ready.set_result(None))
        try:
            await ready
        finally:
            remove(sock)

    # --- threads, replaced by callbacks --------------------------------------------------------------------------

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()

        def call() -> None:
            if done.cancelled():
                return
            try:
                done.set_result(func(*args))
            except Exception as error:  # noqa: BLE001 - whatever it raises, the caller gets
                done.set_exception(error)

        self.call_later(self._rng.uniform(0.0, 0.02), call)
        return done

    def watched(self) -> list[SimSocket]:
        return [*self._readers, *self._writers]


def _cancelled(handle: asyncio.Handle | None) -> bool:
    if handle is not None:
        handle.cancel()
    return handle is not None


class World(Clock):
    """A clock that also advances while processes work."""

    def run_next(self) -> None:
        when, _, what = heapq.heappop(self._heap)
        self.now = max(self.now, when)
        what()


class Scheduler:
    """Runs loops and other events in the order of virtual time. Events of the same time run in a drawn order."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self.clock, self._rng = clock, rng
        self.loops: list[VirtualLoop] = []
        self._turns = 0

    def run_one(self) -> bool:
        """Run one turn of a due loop, or else the next event. Return False if no event is left."""
        due = [loop for loop in self.loops if loop.runs and loop.is_due()]
        if due:
            self._turns += 1
            assert self._turns < _MAX_TURNS, f"{[loop.name for loop in due]} run in an endless loop"
            (due[0] if len(due) == 1 else self._rng.choice(due)).turn()
            self.clock.now += _TURN_S
            return True
        self._turns = 0
        timers = [at for loop in self.loops if loop.runs and (at := loop.due_at()) is not None]
        first, outside = min(timers, default=None), self.clock.next()
        if outside is not None and (first is None or outside <= first):
            self.clock.run_next()
        elif first is not None:
            self.clock.now = max(self.clock.now, first)
        else:
            return False
        return True
