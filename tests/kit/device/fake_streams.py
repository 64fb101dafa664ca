"""The streams of the fake device: kernels that run in order on a thread, and events in between."""

import threading
import time
from queue import SimpleQueue

import torch


class FakeEvent:
    """A point in a stream."""

    def __init__(self):
        self._passed = threading.Event()

    def record(self):
        self._passed.set()

    def passed(self):
        return self._passed.is_set()

    def wait(self, timeout_s=None):
        return self._passed.wait(timeout_s)


class FakeStream:
    """Kernels that run in order on a thread."""

    def __init__(self, name, latency_s=0.0):
        self._kernels = SimpleQueue()
        self._latency_s = latency_s
        self._thread = threading.Thread(target=self._run, name=f"fake-stream-{name}", daemon=True)
        self._thread.start()

    def join(self):
        """Wait for the end of the thread. None in place of a kernel ends it."""
        self._thread.join()

    def enqueue(self, kernel):
        self._kernels.put(kernel)

    def record(self):
        event = FakeEvent()
        self.enqueue(event.record)
        return event

    def wait_event(self, event):
        self.enqueue(event.wait)

    def _run(self):
        with torch.no_grad():  # kernels run without autograd
            while (kernel := self._kernels.get()) is not None:
                time.sleep(self._latency_s)
                kernel()
                del kernel


class HostStream:
    """The stream of ordinary tensor operations. On a CPU they run at once, so the host thread itself is this stream."""

    def __init__(self):
        self._ended = threading.Condition()
        self._running = 0

    def enqueue(self, kernel):
        with self._ended:
            self._running += 1
        try:
            with torch.no_grad():
                kernel()
        finally:
            with self._ended:
                self._running -= 1
                self._ended.notify_all()

    def record(self):
        event = FakeEvent()
        event.record()
        return event

    def wait_event(self, event):
        self.enqueue(event.wait)

    def wait_idle(self):
        with self._ended:
            self._ended.wait_for(lambda: not self._running)
