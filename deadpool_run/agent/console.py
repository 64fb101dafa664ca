"""The launcher's own stdout and stderr, and its lines for the user: on stderr, each with a prefix."""

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import indent

from deadpool_run.coordinator.sink import Sink, Stream
from deadpool_run.text import counted, without_passwords

_STDERR = 2
_PREFIX = "deadpool-run: "
_GRACE_S = 10.0
"""At the end: how long a terminal or pipe may take to accept the last lines."""
_MAX_BYTES = 4 << 20


class Console:
    """Descriptors of terminals, pipes and files that others hold too, each written by a thread: a paused pager does not stall the agent."""

    def __init__(self) -> None:
        self._sinks: dict[object, Sink] = {}
        self._streams: dict[int, Stream] = {}

    def stream(self, fd: int) -> Stream:
        """Return the stream of a descriptor. Two descriptors of one file share a thread, so that lines stay whole."""
        if fd not in self._streams:
            sink = self._sinks.setdefault(_file_of(fd), Sink("deadpool-console", _MAX_BYTES))
            self._streams[fd] = Stream(sink, lambda: fd, notice=_gap, owned=False)
        return self._streams[fd]

    @property
    def dropped(self) -> int:
        """The number of lines that were not written."""
        return sum(stream.dropped for stream in self._streams.values())

    def close(self, grace_s: float) -> bool:
        """Wait for all that was written, up to `grace_s` for each file; return whether it is out."""
        for stream in self._streams.values():
            stream.close()
        closed = [sink.close(grace_s) for sink in self._sinks.values()]
        return all(closed)


_console: Console | None = None
"""Of this process, while it runs a job."""


@contextlib.contextmanager
def in_background() -> Iterator[Console]:
    """Write lines from a thread within the block. At its end they are written, unless the console has stalled."""
    global _console  # noqa: PLW0603 - a process has one stderr
    _console = Console()
    _console.stream(_STDERR)  # made here, as several threads use it
    try:
        yield _console
    finally:
        if _console.close(_GRACE_S):
            _console = None  # else later lines would wait for ever


_run_of_json: str | None = None
"""The run id of a process whose lines are JSON objects."""


def write_json(run_id: str) -> None:
    """Print each line as a JSON object from now on."""
    global _run_of_json  # noqa: PLW0603 - a process has one stderr
    _run_of_json = run_id


def tell(text: str, *, level: str = "info", event: str = "note", **fields: object) -> None:
    """Print a line for the user, without passwords of URLs. A failure is ignored: it must not end a job.

    `level`, `event` (a name that stays) and fields are in JSON lines only.
    """
    line = (_json(text, level, event, fields) if _run_of_json is not None else _plain(text)).encode(errors="replace")
    if _console is not None:
        _console.stream(_STDERR).put(line)
        return
    with contextlib.suppress(OSError):  # the terminal is gone or blocked
        os.write(_STDERR, line)


def _plain(text: str) -> str:
    return f"{_PREFIX}{without_passwords(text)}\n"


def _json(text: str, level: str, event: str, fields: dict[str, object]) -> str:
    """Return a JSON object on a line."""
    parts = {
        "ts": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "level": level,
        "event": event,
        "run_id": _run_of_json,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "message": without_passwords(text),
        **fields,
    }
    return json.dumps(parts, default=str) + "\n"


def _file_of(fd: int) -> object:
    try:
        status = os.fstat(fd)
    except OSError:
        return fd  # it is closed: writing fails, and is ignored
    return status.st_dev, status.st_ino


def _gap(lines: int) -> bytes:
    text = f"{dropped_lines(lines)}: the console did not accept them"
    return (_plain(text) if _run_of_json is None else _json(text, "warning", "dropped", {"lines": lines})).encode()


def dropped_lines(count: int) -> str:
    """Return the text of this many lines."""
    return f"{counted(count, 'line')} dropped"


def announcement(what: str, reason: str) -> str:
    """Return the text of a decision: on one line, or with a reason of several lines below it."""
    if "\n" in reason:
        return f"{what}:\n{indent(reason.rstrip(), '  ')}"
    return f"{what}: {reason}" if reason else what


def report_request(journal: Path) -> str:
    """Return the request to report an error of ours, with versions and the journal."""
    versions = ", ".join(f"{name} {installed_version(name)}" for name in ("deadpool-run", "torch"))
    python = ".".join(map(str, sys.version_info[:3]))
    return (
        f"please report this error with its traceback and these:\n  {versions}, Python {python}\n  journal: {journal}"
    )


def installed_version(name: str) -> str:
    """Return the version of an installed package, or `(not installed)`."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"
