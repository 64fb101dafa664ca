"""Limits the host to one step ahead of the device.

A step whose work the device has not ended may turn out void, because an aborted collective looks successful until it has
run. Waiting for it in every step would leave the device idle while the host prepares the next one. So the end of a step
waits for the end of the step before, and what rests on a step asks whether the device has ended it.
"""

import torch

from deadpool_run.worker.device.backend import DeviceBackend, Mark


class RunAhead:
    """The mark of the last step. `end_step` is for the main thread."""

    def __init__(self, backend: DeviceBackend | None) -> None:
        self._backend = backend
        self._last: Mark | None = None

    def end_step(self, *, now: bool) -> None:
        """Mark the end of a step. Wait until the device has ended the step before, or with `now` this one."""
        if self._backend is None:
            return
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
