"""Workers' output: to the console as it is, to files in torchrun's log tree, or to both with a prefix.

<log dir>/<run id>_<random>/attempt_<generation>/<local rank>/{stdout.log,stderr.log,error.json}
<log dir>/<run id>_<random>/attempt_<generation>/filtered_{stdout,stderr}.log
"""

import contextlib
import os
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from string import Template

from deadpool_run.agent.console import Console, dropped_lines, tell
from deadpool_run.agent.records.error_file import RootCause
from deadpool_run.agent.spec import LOGS_OFF, LaunchSpec, Streams
from deadpool_run.coordinator.sink import PATIENCE_S, Sink, Stream
from deadpool_run.errors import UsageError

_TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_READ_BYTES = 64 << 10
_STDERR = 2
_SHOWN_MOST = 16
"""Tracebacks that are remembered, so that each is shown once."""
MAX_LINE_BYTES = 1 << 20
"""A longer line is shown in pieces."""
_DRAIN_TIMEOUT_S = 30.0
"""At the end: how long the console and the disk may take to accept what workers have written."""
_OPEN_TIMEOUT_S = 1.0
"""How long a log file may take to be opened for a worker. After that a thread copies the worker's output to it, once it is open."""
_MAX_BYTES = 32 << 20
"""Output of all workers that waits for the disk."""


@dataclass(frozen=True, slots=True)
class _Stream:
    name: str
    flag: Streams
    console_fd: int


_STREAMS = (_Stream("stdout", Streams.OUT, 1), _Stream("stderr", Streams.ERR, 2))


class Logs:
    """The log tree of one run, and the threads that copy tee'd streams."""

    def __init__(self, spec: LaunchSpec, console: Console | None = None) -> None:
        """Make the tree's root, unless logs are off. Raises `UsageError` if that fails. By default it has a console of its own."""
        self._spec = spec
        self.console = console or Console()
        self._owns_console = console is None
        self._prefix_template = spec.log_line_prefix_template or os.environ.get(_TEMPLATE_VARIABLE, "")
        self._needles = {"stdout": spec.duplicate_stdout_filters, "stderr": spec.duplicate_stderr_filters}
        self.root: Path | None = None
        """The log tree's root; None if logs are off."""
        if spec.log_dir != LOGS_OFF:
            base = spec.log_dir or spec.run_dir / "logs"
            try:
                base.mkdir(parents=True, exist_ok=True)
                self.root = Path(tempfile.mkdtemp(prefix=f"{spec.run_id}_", dir=base))
            except OSError as error:
                raise UsageError(
                    f"log directory {base}: {error.strerror}\nchoose another with --log-dir, or /dev/null for none"
                ) from error
        self._shown: tuple[str, ...] = ()
        """The last tracebacks on the console."""
        self._attempt: Path | None = None
        self._tees: list[_Tee] = []
        self._dropped = 0
        self._files = Sink("deadpool-logs", _MAX_BYTES)
        self._opener = _Opener()
        self.root_cause = RootCause(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        """The failure that an outer launcher learns of."""

    def begin(self, generation: int) -> None:
        """Make the folders of this generation."""
        self.root_cause.begin()
        if self.root is None:
            return
        attempt = self._attempt = self.root / f"attempt_{generation}"
        self._opener.do(lambda: self._make_folders(attempt))

    def _make_folders(self, attempt: Path) -> None:
        for local_rank in range(max(self._spec.nproc_per_node, self._spec.devices)):
            (attempt / str(local_rank)).mkdir(parents=True, exist_ok=True)
        for stream in _STREAMS:
            if self._needles[stream.name]:  # torchrun makes the file even if no line goes to it
                os.close(_append(attempt / f"filtered_{stream.name}.log"))

    def error_file(self, local_rank: int) -> str:
        """Return the path of the rank's error file; empty if logs are off."""
        return "" if self._attempt is None else str(self._attempt / str(local_rank) / "error.json")

    def show_traceback(self, text: str) -> None:
        """Print a script's traceback on the console, unless it is the same as an earlier one."""
        if text not in self._shown:
            self._shown = (*self._shown[-_SHOWN_MOST + 1 :], text)
            self.console.stream(_STDERR).put(f"{text.rstrip()}\n".encode(errors="replace"))

    def without_shown(self, text: str) -> str:
        """Return a text without the tracebacks that are on the console already, and their headings."""
        for shown in self._shown:
            text = re.sub(rf"(?m)^--- .* ---\n{re.escape(shown.rstrip())}(\n|\Z)", "", text)
        return text

    def open(self, local_rank: int, rank: int) -> dict[str, int]:
        """Open the streams that do not go to the console as they are. The caller closes the descriptors."""
        return {stream.name: fd for stream in _STREAMS if (fd := self._open(stream, local_rank, rank)) is not None}

    @property
    def dropped(self) -> int:
        """The number of lines that are missing in log files."""
        return self._dropped + sum(tee.dropped for tee in self._tees)

    def close(self) -> None:
        """Publish the first failure, and wait until all output is copied, for a bounded time."""
        self._opener.do(self.root_cause.publish)
        deadline = time.monotonic() + _DRAIN_TIMEOUT_S
        for tee in self._tees:
            tee.join(max(0.0, deadline - time.monotonic()))
        self._forget_ended()
        self._opener.close(max(0.0, deadline - time.monotonic()))
        if not self._files.close(max(0.0, deadline - time.monotonic())):
            tell(f"log files in {self.root} are not complete: their disk did not answer within {_DRAIN_TIMEOUT_S:g} s")
        if self._owns_console:
            self.console.close(max(0.0, deadline - time.monotonic()))

    def _forget_ended(self) -> None:
        self._dropped += sum(tee.dropped for tee in self._tees if not tee.is_alive())
        self._tees = [tee for tee in self._tees if tee.is_alive()]

    def _open(self, stream: _Stream, local_rank: int, rank: int) -> int | None:
        home = rank % self._spec.nproc_per_node  # its place when the world began: options name no other
        shown = self._spec.local_ranks_filter is None or home in self._spec.local_ranks_filter
        if self._attempt is not None:  # as in torchrun, output for files goes to the console if logs are off
            tee = stream.flag in self._spec.tee.get(home, Streams.NONE)
            path = self._attempt / str(local_rank) / f"{stream.name}.log"
            if tee and shown:
                prefix = line_prefix(self._prefix_template, self._spec.role, local_rank, rank)
                return self._start_tee(stream, path, self._attempt / f"filtered_{stream.name}.log", prefix)
            if tee or stream.flag in self._spec.redirects.get(home, Streams.NONE):
                fd = self._opener.open(path)
                return self._start_copy(path) if fd is None else fd
        return None if shown else os.open(os.devnull, os.O_WRONLY)

    def _start_tee(self, stream: _Stream, path: Path, filtered: Path, prefix: bytes) -> int:
        needles = tuple(needle.encode() for needle in self._needles[stream.name])
        shown = _Shown(
            prefix, needles, self.console.stream(stream.console_fd), self._log(filtered) if needles else None
        )
        return self._start_copy(path, shown)

    def _start_copy(self, path: Path, shown: "_Shown | None" = None) -> int:
        reader, writer = os.pipe()
        tee = _Tee(reader, self._log(path), shown)
        try:
            tee.start()
        except RuntimeError as error:  # no further thread is allowed
            os.close(reader)
            os.close(writer)
            tell(f"log file {path}: {error}; it stays empty")
            return os.open(os.devnull, os.O_WRONLY)
        self._forget_ended()
        self._tees.append(tee)
        return writer

    def _log(self, path: Path) -> Stream:
        """Return a log file, which the writing thread opens at once, after its folder was made."""
        log = Stream(
            self._files,
            lambda: _append(path),
            on_fault=lambda error: tell(f"log file {path}: {error.strerror}; lines are missing in it"),
            notice=lambda count: f"\n[deadpool-run: {dropped_lines(count)}]\n".encode(),
        )
        log.put(b"")
        return log


def line_prefix(template: str, role: str, local_rank: int, rank: int) -> bytes:
    """Return the prefix of a tee'd line, from torchrun's template of it."""
    macros = {"role_name": role, "rank": rank, "local_rank": local_rank, "hostname": socket.gethostname()}
    return Template(template or "[${role_name}${local_rank}]:").safe_substitute(macros).encode()


@dataclass(frozen=True, slots=True)
class _Shown:
    """Where lines of a stream are shown too. Those with one of the needles also go to `filtered`."""

    prefix: bytes
    needles: tuple[bytes, ...]
    console: Stream
    filtered: Stream | None

    def put(self, lines: list[bytes]) -> None:
        if not lines:
            return
        self.console.put(self._prefixed(lines), patience_s=PATIENCE_S)
        chosen = [line for line in lines if any(needle in line for needle in self.needles)]
        if chosen and self.filtered is not None:
            self.filtered.put(self._prefixed(chosen), patience_s=PATIENCE_S)

    def _prefixed(self, lines: list[bytes]) -> bytes:
        return b"".join(b"%b%b\n" % (self.prefix, line) for line in lines)


class _Tee(threading.Thread):
    """Copies one stream of one worker until its last holder has closed it.

    A file or console that is slow slows the worker down. One that has stalled, such as a pager's, costs lines.
    """

    def __init__(self, reader: int, file: Stream, shown: _Shown | None) -> None:
        super().__init__(name="deadpool-tee", daemon=True)
        self._reader, self._file, self._shown = reader, file, shown

    @property
    def dropped(self) -> int:
        """The number of lines that are missing in its files."""
        filtered = None if self._shown is None else self._shown.filtered
        return self._file.dropped + (0 if filtered is None else filtered.dropped)

    def run(self) -> None:
        rest = b""
        while data := os.read(self._reader, _READ_BYTES):
            self._file.put(data, patience_s=PATIENCE_S)
            if self._shown is not None:
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], b""
                self._shown.put(lines)
        os.close(self._reader)
        self._file.close()
        if self._shown is not None:
            self._shown.put([rest] if rest else [])
            if self._shown.filtered is not None:
                self._shown.filtered.close()


class _Opener:
    """Makes folders and opens files in a thread, which a file system that stalls may keep."""

    def __init__(self) -> None:
        self._sink = Sink("deadpool-log-opener", stays=False)
        self._late: Future[int | None] | None = None
        """Of the call that took too long."""

    def do(self, action: Callable[[], None]) -> None:
        """Have something done before the next file is opened. An error is printed."""

        def run() -> None:
            try:
                action()
            except OSError as error:
                tell(f"logs: {error}")

        self._sink.put(run)

    def open(self, path: Path) -> int | None:
        """Open a log file; None if that fails, or takes too long. Not tried again while an earlier call has no end."""
        if self._late is not None and not self._late.done():
            return None
        opened: Future[int | None] = Future()
        self._sink.put(lambda: opened.set_result(_append_if_possible(path)))
        try:
            return opened.result(_OPEN_TIMEOUT_S)
        except TimeoutError:
            self._late = opened
            opened.add_done_callback(_close_late)
            return None

    def close(self, grace_s: float) -> None:
        """End the thread, or leave it to its file system."""
        self._sink.close(grace_s)


def _append(path: Path) -> int:
    """Open a log file; its folder may be made by another thread."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _append_if_possible(path: Path) -> int | None:
    with contextlib.suppress(OSError):
        return _append(path)
    return None


def _close_late(opened: Future[int | None]) -> None:
    if (fd := opened.result()) is not None:
        os.close(fd)
