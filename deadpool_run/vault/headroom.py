"""The memory that snapshots may still take: free memory within the limits of the control groups, less a reserve.

A limit of the user's (`--snapshot-memory`) may be lower. A process that takes more than there is gets no error: the kernel ends some process. So memory for a snapshot or a copy is
taken only while there is room for it. Workers that grow at the same time announce it on the status page, because memory that
is not used yet still counts as free.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from deadpool_run.errors import NoMemoryError
from deadpool_run.text import size
from deadpool_run.vault.status_page import StatusPage

_GROUPS = Path("/proc/self/cgroup")
_V2_MOUNT = Path("/sys/fs/cgroup")
_V1_MOUNT = Path("/sys/fs/cgroup/memory")
_MOST_RESERVED = 1 << 30
_RESERVED_SHARE = 16
"""A sixteenth of the memory, at most a GiB, is left to the script, which may need more in its next step."""
_RESERVED_PER_WORKER = 192 << 20
"""A worker that ends writes to most of the pages that it shares with the fork server: it takes some 140 MiB for a moment."""
_LOCK_S = 2.0
_LOCK_POLL_S = 0.001


def room(workers: int) -> int:
    """Return how many bytes snapshots and copies may still take on a machine with this many workers.

    Negative if there are too few already.
    """
    machine = psutil.virtual_memory()
    found = [(machine.total, machine.available), *((limit, limit - used) for limit, used in _limits())]
    least = workers * _RESERVED_PER_WORKER
    return min(free - max(least, min(_MOST_RESERVED, total // _RESERVED_SHARE)) for total, free in found)


def check_room(nbytes: int, status_page: StatusPage, workers: int, what: str, *, own: int = 0) -> None:
    """Raise `NoMemoryError` without room for this many more bytes, next to the growth on the status page less `own`."""
    growing, limit = status_page.growing - own, status_page.memory_limit
    left = max(0, room(workers) - growing)
    if nbytes > left:
        raise NoMemoryError(f"no memory for {what}: it needs {size(nbytes)}, and {size(left)} may be used")
    left = max(0, limit - status_page.taken - growing)
    if limit and nbytes > left:
        raise NoMemoryError(
            f"no memory for {what}: it needs {size(nbytes)}, and {size(left)} of --snapshot-memory {size(limit)} are left"
        )


class Growth:
    """The growth of one process of a node, seen by the others; for one thread at a time."""

    def __init__(self, status_page: StatusPage, rank: int, workers: int) -> None:
        """`rank` is this process's rank; `workers` is the number of workers of this node."""
        self._status_page = status_page
        self._workers = workers
        self._own = status_page.rank_entries[rank]

    @contextmanager
    def by(self, nbytes: int, what: str) -> Iterator[None]:
        """Take this much more memory within. Raises `NoMemoryError` without room for it; `what` says for what it is."""
        with self._lock(what):
            self._own.growing = 0
            try:
                check_room(nbytes, self._status_page, self._workers, what)
            except NoMemoryError:
                self._own.growing = -nbytes
                raise
            self._own.growing = nbytes
        try:
            yield
            self._own.taken += nbytes
        finally:
            self._own.growing = 0

    @contextmanager
    def _lock(self, what: str) -> Iterator[None]:
        """Hold the node's lock, which the kernel frees if its owner dies; the wait for a stopped owner is short."""
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.lockf(self._status_page.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise NoMemoryError(
                        f"no memory was taken for {what}: another worker holds the node's lock"
                    ) from None
                time.sleep(_LOCK_POLL_S)
        try:
            yield
        finally:
            fcntl.lockf(self._status_page.fd, fcntl.LOCK_UN)


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use, in bytes, of each control group around this process that has a memory limit."""
    for line in _GROUPS.read_text(encoding="utf-8", errors="replace").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _limits_up(_V2_MOUNT, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _limits_up(
                _V1_MOUNT, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _limits_up(mount: Path, path: str, limit: str, used: str, cache: str) -> Iterator[tuple[int, int]]:
    """Yield limit and use of a group and those around it. Inactive files count as free, as for the kernel."""
    group = mount / path.strip("/")
    for each in (group, *group.parents):
        if not each.is_relative_to(mount):
            return
        try:
            most = (each / limit).read_text(encoding="ascii").strip()
            if most == "max":
                continue
            present = int((each / used).read_text(encoding="ascii"))
            fields = dict(line.split() for line in (each / "memory.stat").read_text(encoding="ascii").splitlines())
        except OSError:
            continue  # the root group has no limit; in a container, groups outside are not seen
        yield int(most), max(0, present - int(fields.get(cache, 0)))
