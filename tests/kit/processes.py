"""Finding processes in /proc, and waiting for their end by pidfd."""

import contextlib
import os
import select
import signal
import time
from pathlib import Path

MARK = "KIT_MARK"
"""The environment variable that marks all processes of a cluster. They inherit it by fork and exec."""

LOOKS = 1000


def marked(mark: str) -> dict[int, str]:
    """Return the running processes with a mark: pid to command line. Zombies are not among them."""
    needle = f"{MARK}={mark}\0".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it has ended
            if needle in (entry / "environ").read_bytes() + b"\0":
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return found


def ended_pid() -> int:
    """Return the pid of a process that has ended."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def wait_dead(pid: int, timeout_s: float = 10.0) -> bool:
    """Wait up to `timeout_s` until a process has ended; return whether it has."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], timeout_s)[0])
    finally:
        os.close(pidfd)


def wait_gone(mark: str, timeout_s: float) -> dict[int, str]:
    """Wait up to `timeout_s` until no process has the mark. Return those that still run."""
    deadline = time.monotonic() + timeout_s
    while left := marked(mark):
        for pid in left:
            if not wait_dead(pid, max(0.0, deadline - time.monotonic())):
                return marked(mark)
        if time.monotonic() > deadline:
            return left
    return {}


def kill_marked(mark: str) -> None:
    """Kill all processes with the mark: those of a cluster that a failed test has left."""
    for pid in marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_gone(mark, 10)


def thread_names(pid: int) -> set[str]:
    """Return the kernel's names of a process's threads. Empty if the process has ended."""
    names = set()
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            names.add((task / "comm").read_text(encoding="utf-8").strip())
    return names


def descriptors() -> dict[int, str]:
    """Return this process's open descriptors, and their files."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of this listing
            found[int(entry.name)] = str(entry.readlink())
    return found


def children() -> set[int]:
    """Return this process's children, zombies included."""
    for _ in range(LOOKS):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread ended: its children moved
            return {
                int(pid)
                for task in Path("/proc/self/task").iterdir()
                for pid in (task / "children").read_text(encoding="utf-8").split()
            }
    raise AssertionError(f"threads of this process ended during each of {LOOKS} looks")
