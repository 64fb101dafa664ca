"""A control group with a memory limit, for one test. It needs root, as in a CI container."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class MemoryGroup:
    """A control group. Processes join it by themselves, and it must be empty at the end."""

    def __init__(self, path: Path, *, is_v1: bool) -> None:
        self.path = path
        self._is_v1 = is_v1

    def limit(self, nbytes: int) -> None:
        """Set the limit."""
        name = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
        (self.path / name).write_text(str(nbytes), encoding="ascii")

    def peak(self) -> int:
        """Return the peak memory use, in bytes."""
        return int(
            (self.path / ("memory.max_usage_in_bytes" if self._is_v1 else "memory.peak")).read_text(encoding="ascii")
        )

    def kills(self) -> int:
        """Return the number of processes that the kernel's OOM killer has ended."""
        told = (self.path / ("memory.oom_control" if self._is_v1 else "memory.events")).read_text(encoding="ascii")
        return int(dict(line.split() for line in told.splitlines())["oom_kill"])

    def command(self, *words: str) -> list[str]:
        """Return a command that runs these words in the group."""
        return ["/bin/sh", "-c", f'echo $$ > {self.path}/cgroup.procs && exec "$@"', "sh", *words]


@contextmanager
def memory_group(name: str) -> Iterator[MemoryGroup]:
    """Make a control group below this process's group. Skip the test if that is not allowed."""
    for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
        _, controllers, own = line.split(":", 2)
        is_v1 = "memory" in controllers.split(",")
        if not is_v1 and controllers:
            continue
        path = (_V1 if is_v1 else _V2) / own.strip("/") / name
        try:
            path.mkdir()
        except OSError:
            continue
        group = MemoryGroup(path, is_v1=is_v1)
        try:
            group.limit(1 << 40)
        except OSError:  # no memory controller
            path.rmdir()
            continue
        try:
            yield group
        finally:
            path.rmdir()
        return
    pytest.skip("this machine does not allow a control group with a memory limit")
