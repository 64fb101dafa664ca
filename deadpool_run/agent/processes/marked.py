"""Processes with the job's mark in their environment: found in /proc, and ended. They may have left their process group."""

import contextlib
import os
import signal
import time
from pathlib import Path

_END_S, _LOOK_AGAIN_S = 30.0, 0.01
_EXEC_S = 1.0
"""Limit for waiting until programs that begin have their environment. They need less than a millisecond."""
_PF_KTHREAD = 0x00200000
"""Flag of a kernel thread (include/linux/sched.h)."""
_STATE, _FLAGS, _START_CODE, _ENV_START, _ENV_END = 0, 6, 23, 47, 48
"""Places in /proc/PID/stat after the name (proc(5)). The kernel sets the start of the code last."""


def end(mark: bytes) -> None:
    """SIGKILL every other process with the mark, until none is found that was not killed."""
    killed: set[int] = set()
    until = time.monotonic() + _EXEC_S
    while True:
        found, certain = look(mark)
        for pid in found - killed:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # from here on it cannot fork, so the loop ends
        if found <= killed and (certain or time.monotonic() > until):
            return
        killed |= found


def have_ended(mark: bytes) -> bool:
    """Wait until the processes with the mark have ended. False: one hangs in the kernel."""
    until = time.monotonic() + _END_S
    while look(mark) != (set(), True):
        if time.monotonic() > until:
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


def look(mark: bytes) -> tuple[set[int], bool]:
    """Return the other processes with the mark, and whether all processes could be asked.

    A process that calls exec has no environment for a moment, between its old program and the new one.
    """
    found, certain = set(), True
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it is gone, or another user's
            environment = (process / "environ").read_bytes()
            if mark in environment.split(b"\0"):
                found.add(int(process.name))
            elif not environment and _is_in_exec(process):
                certain = False
    return found - {os.getpid()}, certain


def _is_in_exec(process: Path) -> bool:
    """Return whether a process whose environment was read as empty may have been in exec.

    Else it has ended, is a thread of the kernel, or was given an empty environment.
    """
    fields = (process / "stat").read_text(errors="replace").rpartition(")")[2].split()
    no_program = fields[_STATE] in "ZX" or int(fields[_FLAGS]) & _PF_KTHREAD
    was_empty = int(fields[_START_CODE]) and fields[_ENV_START] == fields[_ENV_END]
    return not no_program and not was_empty
