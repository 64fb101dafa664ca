"""A worker's socket to its agent: one thread reads orders, any thread sends reports.

Only the newest order of each kind is kept, not a queue. Once a newer epoch is known, orders of older epochs are void, so
that a worker which was busy follows only valid orders.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from typing import NoReturn

from deadpool_run.core.effects import AbortStep, LimitSteps, ReleaseWorker, ResumeFrom, SetCaptureInterval
from deadpool_run.core.events import AbortFailed, StepsLimited
from deadpool_run.errors import ProtocolError, RunLeft
from deadpool_run.ids import Epoch, Version
from deadpool_run.wire import descriptors
from deadpool_run.wire.messages import (
    FORMAT,
    THIS_WORKER,
    Assign,
    Attach,
    Dismiss,
    ExitNow,
    HangNow,
    Message,
    OutOfMemoryNow,
    RunAgain,
    Stop,
    encode,
)
from deadpool_run.worker.process.injected import fail, inject
from deadpool_run.worker.process.unwind import AsyncRaise

_MAX_FDS = 8
_AGENT_GONE = 1
_END_S = 60.0


def park(control: socket.socket) -> tuple[Assign, list[int]] | None:
    """Wait for a rank from the agent; return it with its descriptors, or None if the spare is dismissed.

    Runs before the reading thread exists. Exits the process if the agent is gone. Raises `ProtocolError` for any other order.
    """
    received = receive(control)
    if received is None:
        os._exit(_AGENT_GONE)
    message, fds = received
    match message:
        case Assign():
            return message, fds
        case Dismiss() | Stop():
            return None
        case ExitNow() | HangNow():
            return fail(message)
        case _:
            raise ProtocolError(f"a parked worker received the unexpected message {type(message).__name__}")


def receive(control: socket.socket) -> tuple[Message, list[int]] | None:
    """Return the next message with its descriptors; None if the agent has closed the socket.

    Reads not one byte beyond the message: the rest may belong to another reader, or carry other descriptors.
    """
    frames, fds = FORMAT.frames(), list[int]()
    while True:
        data, more = descriptors.receive(control, frames.missing, _MAX_FDS)
        fds += more
        if not data:
            return None
        for message in frames.feed(data):
            return message, fds


class AgentOrders:
    """The newest orders, for the main thread to wait on.

    Each wait raises SystemExit when the job ends, and `RunLeft` when the script has to run again.
    """

    def __init__(self, epoch: Epoch, unwind: Callable[[], None] = lambda: None) -> None:
        """`unwind` raises `RunLeft` in the main thread; it is called when the script has to run again."""
        self._changed = threading.Condition()
        self._unwind = unwind
        self.epoch = epoch  # the newest known epoch; never falls
        self._resume: ResumeFrom | None = None
        self._attach: Attach | None = None
        self._limit: LimitSteps | None = None  # its version: at which the loop stops
        self._begun = Version(-1)  # the version from which the newest step began
        self._released = False
        self._assigned: tuple[Assign, list[int]] | None = None
        self._stopping = False
        self._leaving = False
        self.moved_store: tuple[str, int] | None = None
        """The store's new address for the next run of the script; None: unchanged."""

    def _wait_for(self, come: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Block until `come()`, or until the timeout. Takes the lock, which the caller may hold too."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or self._leaving or come(), timeout_s)
            if self._stopping and not come():
                raise SystemExit(1)
            if self._leaving:
                raise RunLeft

    def _leave(self) -> None:
        # Start the async raise before any waiter wakes: a thread that woke first would be hit after it had unwound.
        self._leaving = True
        self._unwind()

    def put_assigned(self, order: Assign, fds: list[int], *, leave: bool) -> None:
        """Note the rank that a spare was given; `leave`: it has rehearsed as another rank."""
        with self._changed:
            self._assigned = order, fds
            self.epoch = max(self.epoch, order.epoch)
            if leave:
                self._leave()
            self._changed.notify_all()

    def take_assigned(self) -> tuple[Assign, list[int]] | None:
        """Return and clear the rank that this spare was given since it was parked."""
        with self._changed:
            assigned, self._assigned = self._assigned, None
            return assigned

    def wait_assigned(self) -> tuple[Assign, list[int]]:
        """Block until this spare is given a rank; return the rank with its descriptors."""
        self._wait_for(lambda: self._assigned is not None)
        assigned = self.take_assigned()
        assert assigned is not None
        return assigned

    def left(self) -> None:
        """Note that the main thread has left its run of the script."""
        with self._changed:
            self._leaving = False

    def put(self, order: AbortStep | RunAgain | ResumeFrom | Attach | ReleaseWorker | Stop) -> bool:
        """Keep the order; return False if it belongs to an older epoch and is void."""
        with self._changed:
            match order:
                case ReleaseWorker():
                    self._released = True
                case Stop():
                    self._stopping = True
                case AbortStep(epoch=epoch) | ResumeFrom(epoch=epoch) | Attach(epoch=epoch) if epoch < self.epoch:
                    return False
                case RunAgain(store_host=host, store_port=port):
                    self._leave()
                    self.moved_store = (host, port) if host else None
                case AbortStep(epoch=epoch):
                    self.epoch = epoch
                    self._resume = self._attach = self._limit = None
                case ResumeFrom():
                    self._resume = order
                case Attach():
                    self._attach = order
            self._changed.notify_all()
            return True

    def limit(self, order: LimitSteps) -> Version | None:
        """Take a limit of the steps; return the version at which the loop will stop, None if it is void or no limit.

        A step that has begun is completed: other ranks may wait for it already.
        """
        with self._changed:
            if order.epoch < self.epoch:
                return None
            version = None if order.version is None else max(order.version, Version(self._begun + 1))
            self._limit = None if version is None else LimitSteps(order.worker, order.epoch, version)
            self._changed.notify_all()
            return version

    def begins_step(self, version: Version, total: int) -> bool:
        """Note that the step after this version, of `total`, begins; return False if there is a limit, and it must not."""
        with self._changed:
            if self._is_limited(version):
                return False
            self._begun = Version(min(version, total - 1))
            return True

    def wait_limit(self, version: Version, epoch: Epoch, seen: LimitSteps | None) -> LimitSteps | None:
        """Block until another limit than `seen` holds this version back; None if none does, or a newer epoch came."""
        with self._changed:
            self._wait_for(
                lambda: self.epoch > epoch or not self._is_limited(version) or self._limit is not seen,
            )
            return self._limit if self.epoch == epoch and self._is_limited(version) else None

    def _is_limited(self, version: Version) -> bool:
        limit = None if self._limit is None else self._limit.version
        return limit is not None and version >= limit

    def wait_newer(self, epoch: Epoch) -> Epoch:
        """Block until an epoch newer than this is known; return it."""
        self._wait_for(lambda: self.epoch > epoch)
        return self.epoch

    def wait_resume(self, epoch: Epoch) -> int | None:
        """Block until the resume version of this epoch is known; None if a newer epoch came first."""
        with self._changed:
            self._wait_for(lambda: self.epoch > epoch or self._resume is not None)
            return None if self.epoch > epoch or self._resume is None else self._resume.version

    def wait_attach(self, epoch: Epoch) -> Attach | None:
        """Block until the order to attach in this epoch; None if a newer epoch came first."""
        with self._changed:
            self._wait_for(lambda: self.epoch > epoch or self._attach is not None)
            return None if self.epoch > epoch else self._attach

    def wait_left(self) -> NoReturn:
        """Block, whatever epochs come, until the agent ends this process or orders it to run the script again."""
        while True:
            self._wait_for(lambda: False)

    def wait_end(self) -> None:
        """Block until the agent ends this process. Any thread. Raises RuntimeError if it does not for a minute."""
        if threading.current_thread() is threading.main_thread():
            self._wait_for(lambda: False, _END_S)
        else:
            threading.Event().wait(_END_S)
        raise RuntimeError(f"a peer was lost {_END_S:g} s ago, and the agent has not ended this process")

    def stops_within(self, timeout_s: float) -> bool:
        """Return whether the job ends, or an order to end comes soon."""
        with self._changed:
            return self._changed.wait_for(lambda: self._stopping, timeout_s)

    def wait_release(self, epoch: Epoch) -> bool:
        """Block until the loop may end; False if a newer epoch came first."""
        self._wait_for(lambda: self.epoch > epoch or self._released)
        return self._released


class AgentLink:
    """The socket and its reading thread."""

    def __init__(self, control: socket.socket, epoch: Epoch) -> None:
        self._unwind = AsyncRaise()
        self.orders = AgentOrders(epoch, self._unwind.begin)
        self._control = control
        self._sending = threading.Lock()
        self._on_abort: Callable[[Epoch], None] | None = None
        self._on_interval: Callable[[int], None] | None = None
        self._interval: int | None = None
        self._fds: list[int] = []
        self.preparing: int | None = None
        """The rank that a spare rehearses before it is needed."""
        self.reentrant = False
        """Whether this process can run its script again."""
        self._owner_pid = os.getpid()
        self._thread = threading.Thread(target=self._read, name="deadpool-link", daemon=True)
        self._thread.start()

    def subscribe(self, *, on_abort: Callable[[Epoch], None], on_interval: Callable[[int], None]) -> None:
        """Set callbacks for the reading thread. `on_abort` is called after `orders` has the new epoch."""
        self._on_abort = on_abort
        self._on_interval = on_interval
        if self._interval is not None:
            on_interval(self._interval)

    def left(self) -> None:
        """Drop the callbacks: the run of the script is over. For the main thread."""
        self._unwind.end()
        self.orders.left()
        self._on_abort = self._on_interval = None

    def send(self, message: Message) -> None:
        """Send to the agent. If it is gone, this worker ends too: its parent-death signal is on the way."""
        with self._sending, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._control.sendall(encode(message))

    def _read(self) -> None:
        frames = FORMAT.frames()
        while data := self._receive():
            for message in frames.feed(data):
                self._obey(message)
        if os.getpid() == self._owner_pid:
            os._exit(_AGENT_GONE)

    def _receive(self) -> bytes:
        try:
            data, fds = descriptors.receive(self._control, 64 << 10, _MAX_FDS)
        except ConnectionResetError:
            return b""
        self._fds += fds
        return data

    def _obey(self, message: Message) -> None:  # noqa: C901 - one case for each order
        match message:
            case AbortStep(epoch=epoch):
                if self.orders.put(message) and self._on_abort is not None:
                    self._on_abort(epoch)
            case Assign() if self.preparing is not None:
                fds, self._fds = self._fds, []
                self.orders.put_assigned(message, fds, leave=message.rank != self.preparing)
            case Dismiss() if self.preparing is not None:
                os._exit(0)
            case RunAgain(epoch=epoch) if not self.reentrant:
                self.send(AbortFailed(THIS_WORKER, epoch, "its process cannot run the script again"))
            case RunAgain() | ResumeFrom() | Attach() | ReleaseWorker() | Stop():
                self.orders.put(message)
            case LimitSteps(epoch=epoch):
                if (version := self.orders.limit(message)) is not None:
                    self.send(StepsLimited(THIS_WORKER, epoch, version))
            case SetCaptureInterval(interval=interval):
                self._interval = interval
                if self._on_interval is not None:
                    self._on_interval(interval)
            case ExitNow() | HangNow() | OutOfMemoryNow():
                inject(message)
            case _:
                raise ProtocolError(f"a worker received the unexpected message {type(message).__name__}")
