"""Limits the host to one step ahead of the device.

A step whose work the device has not ended may turn out void, because an aborted collective looks successful until it has
run. Waiting for it in every step would leave the device idle while the host prepares the next one. So the end of a step
waits for the end of the step before, and what rests on a step asks whether the device has ended it.
"""

from typing import Any

import torch

from deadpool_run.worker.device.backend import DeviceBackend, Mark


class RunAhead:
    """The mark of the last step. `end_step` is for the main thread."""

    def __init__(self, backend: DeviceBackend | None) -> None:
        self._backend = backend
        self._last: Mark | None = None
        self._streams: set[Any] = set()

    def note(self) -> None:
        """Note that an optimizer updates on the calling thread's streams. Any thread."""
        if self._backend is not None:
            self._streams.update(self._backend.streams())

    def join(self) -> None:
        """Let the main thread's streams wait for those of its optimizers. The host does not wait."""
        if self._backend is not None:
            streams, self._streams = self._streams, set()
            self._backend.join(streams)

    def end_step(self, *, now: bool) -> None:
        """Mark the end of a step, all of its updates included. Wait until the device has ended the step before, or with `now` this one."""
        if self._backend is None:
            return
        self.join()
        before, self._last = self._last, self._backend.mark()
        if now:
            self._last.wait()
        elif before is not None:
            before.wait()

    @property
    def ended(self) -> bool:
        """Whether the device has ended every step that the host has ended. Any thread; never waits."""
        last = self._last
        return last is None or last.passed()


def wait_idle(backend: DeviceBackend | None) -> None:
    """Wait for all work that this process has given to its devices: of the main thread's stream, and of the script's others."""
    if backend is not None:
        backend.mark().wait()
    if torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            if torch.cuda.memory_reserved(index):  # else the wait would open a context on a device that nobody uses
                torch.cuda.synchronize(index)
