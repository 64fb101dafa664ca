"""Workers' output: to the console as it is, to files in torchrun's log tree, or to both with a prefix.

<log dir>/<run id>_<random>/attempt_<generation>/<local rank>/{stdout.log,stderr.log,error.json}
<log dir>/<run id>_<random>/attempt_<generation>/filtered_{stdout,stderr}.log
"""

import os
import select
import socket
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from string import Template

from deadpool_run.agent.records.error_file import RootCause
from deadpool_run.agent.spec import LOGS_OFF, LaunchSpec, Streams
from deadpool_run.errors import UsageError

_TEMPLATE_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"
_READ_BYTES = 64 << 10
MAX_LINE_BYTES = 1 << 20
"""A longer line is shown in pieces."""
_DRAIN_TIMEOUT_S = 30.0
"""At the end: how long the console may take to accept what workers have written."""


@dataclass(frozen=True, slots=True)
class _Stream:
    name: str
    flag: Streams
    console_fd: int


_STREAMS = (_Stream("stdout", Streams.OUT, 1), _Stream("stderr", Streams.ERR, 2))


class Logs:
    """The log tree of one run, and the threads that copy tee'd streams."""

    def __init__(self, spec: LaunchSpec) -> None:
        """Make the tree's root, unless logs are off. Raises `UsageError` if that fails."""
        self._spec = spec
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
        self._attempt: Path | None = None
        self._tees: list[_Tee] = []
        self._console = threading.Lock()
        self.root_cause = RootCause(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        """The failure that an outer launcher learns of."""

    def begin(self, generation: int) -> None:
        """Make the folders of this generation."""
        self.root_cause.begin()
        if self.root is None:
            return
        self._attempt = self.root / f"attempt_{generation}"
        for local_rank in range(self._spec.nproc_per_node):
            (self._attempt / str(local_rank)).mkdir(parents=True, exist_ok=True)
        for stream in _STREAMS:
            if self._needles[stream.name]:  # torchrun makes the file even if no line goes to it
                os.close(_append(self._attempt / f"filtered_{stream.name}.log"))

    def error_file(self, local_rank: int) -> str:
        """Return the path of the rank's error file; empty if logs are off."""
        return "" if self._attempt is None else str(self._attempt / str(local_rank) / "error.json")

    def open(self, local_rank: int, rank: int) -> dict[str, int]:
        """Open the streams that do not go to the console as they are. The caller closes the descriptors."""
        return {stream.name: fd for stream in _STREAMS if (fd := self._open(stream, local_rank, rank)) is not None}

    def close(self) -> None:
        """Publish the first failure, and wait until all output is copied, for a bounded time."""
        self.root_cause.publish()
        for tee in self._tees:
            tee.join(_DRAIN_TIMEOUT_S)
        self._tees.clear()

    def _open(self, stream: _Stream, local_rank: int, rank: int) -> int | None:
        shown = self._spec.local_ranks_filter is None or local_rank in self._spec.local_ranks_filter
        if self._attempt is not None:  # as in torchrun, output for files goes to the console if logs are off
            tee = stream.flag in self._spec.tee.get(local_rank, Streams.NONE)
            path = self._attempt / str(local_rank) / f"{stream.name}.log"
            if tee and shown:
                prefix = line_prefix(self._prefix_template, self._spec.role, local_rank, rank)
                return self._start_tee(stream, path, self._attempt / f"filtered_{stream.name}.log", prefix)
            if tee or stream.flag in self._spec.redirects.get(local_rank, Streams.NONE):
                return _append(path)
        return None if shown else os.open(os.devnull, os.O_WRONLY)

    def _start_tee(self, stream: _Stream, path: Path, filtered: Path, prefix: bytes) -> int:
        reader, writer = os.pipe()
        needles = tuple(needle.encode() for needle in self._needles[stream.name])
        tee = _Tee(reader, path, filtered, stream.console_fd, prefix=prefix, needles=needles, console=self._console)
        tee.start()
        self._tees = [other for other in self._tees if other.is_alive()] + [tee]
        return writer


def line_prefix(template: str, role: str, local_rank: int, rank: int) -> bytes:
    """Return the prefix of a tee'd line, from torchrun's template of it."""
    macros = {"role_name": role, "rank": rank, "local_rank": local_rank, "hostname": socket.gethostname()}
    return Template(template or "[${role_name}${local_rank}]:").safe_substitute(macros).encode()


class _Tee(threading.Thread):
    """Copies one stream of one worker until its last holder has closed it.

    It is a thread, so that a blocked console, such as a pager, blocks the worker and never the agent.
    """

    def __init__(  # noqa: PLR0913 - where a line comes from, where it goes, and how it looks there
        self,
        reader: int,
        path: Path,
        filtered: Path,
        console_fd: int,
        *,
        prefix: bytes,
        needles: tuple[bytes, ...],
        console: threading.Lock,
    ) -> None:
        super().__init__(name=f"deadpool-tee-{path.parent.name}", daemon=True)
        self._reader = reader
        self._prefix = prefix
        self._needles = needles
        self._console = console
        self._file: int | None = _append(path)
        self._filtered: int | None = _append(filtered) if needles else None
        self._console_fd: int | None = console_fd

    def run(self) -> None:
        rest = b""
        while data := os.read(self._reader, _READ_BYTES):
            self._file = _write(self._file, data)
            *lines, rest = (rest + data).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            self._show(lines)
        if rest:
            self._show([rest])
        for fd in (self._reader, self._file, self._filtered):
            if fd is not None:
                os.close(fd)

    def _show(self, lines: list[bytes]) -> None:
        if not lines:
            return
        with self._console:
            self._console_fd = _write(self._console_fd, b"".join(b"%b%b\n" % (self._prefix, line) for line in lines))
            chosen = [line for line in lines if any(needle in line for needle in self._needles)]
            self._filtered = _write(self._filtered, b"".join(b"%b%b\n" % (self._prefix, line) for line in chosen))


def _append(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _write(fd: int | None, data: bytes) -> int | None:
    """Write all data; return the descriptor, or None if that fails. Then the rest of the stream is dropped."""
    view = memoryview(data)
    while fd is not None and view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:  # another holder of the console has made it non-blocking
            select.select([], [fd], [])
        except OSError:  # the reader is gone or the disk is full; the other copy of the stream continues
            return None
    return fd
