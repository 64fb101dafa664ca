"""The statuses of a run as they come, read by a thread: keys never wait for a run that is slow to answer."""

import contextlib
import os
import threading
from types import TracebackType
from typing import Self

from deadpool_run.cli.runs.client import ControlClient
from deadpool_run.view.health import Status

_CHUNK = 4096


class StatusFeed:
    """A context manager. `fd` is readable when `take` has news."""

    def __init__(self, run: ControlClient, every_s: float) -> None:
        """Prepare to watch the run."""
        self._run, self._every_s = run, every_s
        self.fd, self._bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._latest: Status | None = None
        self._error: BaseException | None = None
        self.ended = False
        """Whether the run has ended. Then no more status comes."""
        self._thread = threading.Thread(target=self._read, name="deadpool-status", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._run.hang_up()
        self._thread.join()
        os.close(self.fd)
        os.close(self._bell)

    def take(self) -> Status | None:
        """Return the newest status since the last call. Raises what the run's answer raised."""
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, _CHUNK)
        if self._error is not None:
            raise self._error
        latest, self._latest = self._latest, None
        return latest

    def _read(self) -> None:
        try:
            for status in self._run.watch(self._every_s):
                self._latest = status
                self._ring()
        except BaseException as error:  # noqa: BLE001 - `take` raises it in the main thread
            self._error = error
        self.ended = True
        self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.write(self._bell, b"!")
