"""Threads that wait in the place of others, where a wait may never end.

Gloo forgets a send or receive whose connection breaks in the middle of its message: its wait ends only when the
operation's own time-out is over, and nothing can end it earlier.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue

Task = Callable[[], None]


class Waiters:
    """A pool that grows when all of its threads are busy; a thread that is stuck is simply not idle."""

    def __init__(self) -> None:
        self._idle: list[SimpleQueue[Task]] = []
        self._lock = threading.Lock()

    def start(self, task: Task) -> None:
        """Run the task, which must not raise, in an idle or a new thread."""
        with self._lock:
            queue = self._idle.pop() if self._idle else None
        if queue is None:
            queue = SimpleQueue()
            threading.Thread(target=self._serve, args=(queue,), name="deadpool-wait", daemon=True).start()
        queue.put(task)

    def _serve(self, queue: SimpleQueue[Task]) -> None:
        while True:
            task = queue.get()
            task()
            del task  # an idle thread keeps nothing alive
            with self._lock:
                self._idle.append(queue)
