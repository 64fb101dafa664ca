"""The error file of the first failure, for an outer launcher or a scheduler.

torchrun's convention: a worker writes its exception to the file that `TORCHELASTIC_ERROR_FILE` names in its environment. The
launcher copies that of the first failure, with the exit code, to the file that the variable names in its own environment.
"""

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deadpool_run.agent import atomic_file
from deadpool_run.agent.console import tell
from deadpool_run.ids import WorkerId
from deadpool_run.wire.typed import read_object

_MAX_BYTES = 16 << 20
"""A larger error file is not read."""


class RootCause:
    """The first failure of this node's workers that was not repaired. `own` is our own error file; empty for none."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._files: dict[WorkerId, str] = {}
        self._failures: dict[str, tuple[int, float]] = {}
        """The exit code and the time of each failure, by its error file."""

    def begin(self) -> None:
        """Forget the failures that a new generation has repaired."""
        self._files.clear()
        self._failures.clear()

    def assigned(self, worker: WorkerId, error_file: str) -> None:
        """Record the worker's error file. The worker replaces the last one with this file."""
        self._files[worker] = error_file
        self._failures.pop(error_file, None)

    def ended(self, worker: WorkerId, code: int | None, signal: int | None) -> None:
        """Record how a worker ended."""
        file = self._files.pop(worker, None)
        exit_code = -signal if signal is not None else code
        if self._own and file is not None and exit_code:
            self._failures[file] = exit_code, float(int(time.time()))

    def publish(self) -> None:
        """Copy the first failure's error file to our own, if there is one."""
        found = [(*failure, _read(file)) for file, failure in self._failures.items()]  # not before: a disk may stall
        exit_code, _, error = min(found, key=lambda each: _time_of(each[2], each[1]), default=(0, 0.0, None))
        if error is None:
            return
        body, message = dict(error), error["message"]
        if isinstance(message, dict):
            body["message"] = {**message, "errorCode": exit_code}
        try:
            atomic_file.replace(Path(self._own), json.dumps(body), atomic_file.PUBLIC)
        except OSError as unwritable:
            tell(f"the error file {self._own} cannot be written: {unwritable.strerror}")


def _read(file: str) -> Mapping[str, Any] | None:
    """Return an error file's content; None if there is no valid one."""
    path = Path(file)
    with contextlib.suppress(OSError):
        if path.is_file() and path.stat().st_size <= _MAX_BYTES and "message" in (content := read_object(path)):
            return content
    return None


def _time_of(error: Mapping[str, Any] | None, seen_at: float) -> float:
    """Return the time of the failure in whole seconds: that of its error file, else when it was seen."""
    message = {} if error is None else error["message"]
    extra = message.get("extraInfo") if isinstance(message, dict) else error
    timestamp = extra.get("timestamp") if isinstance(extra, Mapping) else None
    try:
        return float(int(timestamp or ""))
    except (TypeError, ValueError, OverflowError):
        return seen_at
