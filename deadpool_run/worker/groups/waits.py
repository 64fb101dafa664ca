"""Waits in Gloo: threads that block in place of the caller, and the cancellation of waits after an abort.

Gloo forgets a send or receive whose connection breaks in the middle of a message. Its wait then ends only at the
operation's own timeout, and nothing can end it earlier.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from deadpool_run.worker.process.script_threads import OurThread

_GRACE_S = 0.05
"""From severing the connections until unfinished waits are cancelled. Gloo ends most within 1 ms, and never ends those
whose message was cut in the middle."""

Task = Callable[[], None]


class WaitThreads:
    """A thread pool that grows while all its threads are busy. A thread that is stuck is simply not idle."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Task]] = []
        self._lock = threading.Lock()

    def start(self, task: Task) -> None:
        """Run the task, which must not raise, in an idle or a new thread."""
        with self._lock:
            queue = self._idle.pop() if self._idle else None
        if queue is None:
            queue = SimpleQueue()
            OurThread(target=self._serve, args=(queue,), name="deadpool-wait", daemon=True).start()
        queue.put(task)

    def free(self, communicators: list[Any], timeout_s: float) -> None:
        """Free communicators in another thread, which joins Gloo's threads, and wait a limited time for it.

        Never under a lock that callbacks on Gloo's threads may need.
        """
        if not any(communicators):
            return
        freed = threading.Event()

        def free() -> None:
            communicators.clear()
            freed.set()

        self.start(free)
        freed.wait(timeout_s)

    def _serve(self, queue: SimpleQueue[Task]) -> None:
        while True:
            task = queue.get()
            task()
            del task  # an idle thread keeps nothing alive
            with self._lock:
                self._idle.append(queue)


class WaitCancellation:
    """Cancels the waits of a generation of communicators, once its grace period is over. Thread-safe.

    At most one thread sleeps for all grace periods together, however fast aborts follow one another.
    """

    def __init__(self, threads: WaitThreads) -> None:
        self.newest = 0
        """The newest cancelled generation."""
        self._threads = threads
        self._lock = threading.Lock()
        self._callbacks: dict[Callable[[], object], int] = {}
        self._pending: deque[tuple[float, int]] = deque()

    def add_callback(self, callback: Callable[[], object], generation: int) -> None:
        """Call back when this generation is cancelled; at once if it is already."""
        with self._lock:
            if self.newest < generation:
                self._callbacks[callback] = generation
                return
        callback()

    def remove_callback(self, callback: Callable[[], object]) -> None:
        """Undo `add_callback`."""
        with self._lock:
            self._callbacks.pop(callback, None)

    def schedule(self, generation: int) -> None:
        """Cancel this generation after the grace period: its connections have just been severed."""
        with self._lock:
            self._pending.append((time.monotonic() + _GRACE_S, generation))
            is_running = len(self._pending) > 1
        if not is_running:
            self._threads.start(self._run)

    def _run(self) -> None:
        left = True
        while left:
            moment, generation = self._pending[0]
            threading.Event().wait(moment - time.monotonic())
            with self._lock:
                self.newest = max(self.newest, generation)
                due = [callback for callback, of in self._callbacks.items() if of <= generation]
                for callback in due:
                    del self._callbacks[callback]
            for callback in due:
                callback()
            with self._lock:
                self._pending.popleft()
                left = bool(self._pending)
