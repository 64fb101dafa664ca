"""Child processes: watched by pidfd, ended with their process group, always reaped."""

import asyncio
import contextlib
import ctypes
import os
import select
import signal
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deadpool_run.procfs import children_of

_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_DUMPABLE = 4
_OUT_OF_REACH = (ProcessLookupError, PermissionError)
"""No signal reaches a process that is gone, or runs a setuid program."""

_QUIET_S = 1.0
"""A wait that ends within this time is not reported."""


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended; exactly one is set."""

    code: int | None
    signal: int | None


class Process:
    """A child that leads its own process group.

    When it ends, the rest of its group is signalled while it is a zombie, since no other process can have its number then. If
    it ended with code 0, or was asked to end, the rest gets SIGTERM and, after the grace, SIGKILL; else SIGKILL at once, as a
    replacement needs its devices. Then it is reaped, and `on_exit` is called once.
    """

    def __init__(self, pid: int, on_exit: Callable[[Exit], None], grace_s: float = 0.0) -> None:
        """Watch the child `pid`, in the running loop. Raises ProcessLookupError if there is none."""
        self.pid = pid
        self._grace_s = grace_s
        self.gone = asyncio.Event()
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._kill_timer: asyncio.TimerHandle | None = None
        self._pidfd = os.pidfd_open(pid)
        self._loop.add_reader(self._pidfd, self.reap)

    @property
    def alive(self) -> bool:
        """Whether it has not been reaped."""
        return self._pidfd >= 0

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        if self.alive:
            with contextlib.suppress(*_OUT_OF_REACH):
                signal.pidfd_send_signal(self._pidfd, number)

    def signal_group(self, number: int) -> None:
        """Send a signal to the process and all that it started."""
        if self.alive:
            with contextlib.suppress(*_OUT_OF_REACH):
                os.killpg(self.pid, number)

    def kill_after(self, grace_s: float) -> None:
        """SIGKILL the group once the grace is over. A later call may only shorten the grace."""
        if not self.alive:
            return
        due = self._loop.time() + grace_s
        if self._kill_timer is not None:
            due = min(due, self._kill_timer.when())
            self._kill_timer.cancel()
        self._kill_timer = self._loop.call_at(due, self.signal_group, signal.SIGKILL)

    def reap(self) -> None:
        """Reap the process if it has ended."""
        if not self.alive:
            return
        ended = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return
        if self._kill_timer is not None or (ended.si_code == os.CLD_EXITED and ended.si_status == 0):
            self._end_rest()
        else:
            self.signal_group(signal.SIGKILL)
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED)
        assert result is not None
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = -1
        if self._kill_timer is not None:
            self._kill_timer.cancel()
        self.gone.set()
        exited = result.si_code == os.CLD_EXITED
        self._on_exit(Exit(result.si_status, None) if exited else Exit(None, result.si_status))

    def _end_rest(self) -> None:
        """Ask the rest of the group to end. Later the group's number may be another's, so each process is held by a pidfd."""
        rest = _pidfds(pid for pid in _descendants() if _group_of(pid) == self.pid and pid != self.pid)
        self.signal_group(signal.SIGTERM)
        if rest:
            due = self._loop.time() + self._grace_s if self._kill_timer is None else self._kill_timer.when()
            self._loop.call_at(due, _kill, rest)


def become_subreaper() -> None:
    """Have orphaned descendants become children of this process (PR_SET_CHILD_SUBREAPER, prctl(2))."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def hide_memory() -> None:
    """Keep the user's other processes out of this one's memory, environment and descriptors (PR_SET_DUMPABLE, prctl(2)).

    The kernel writes no core file of it, and only root can attach a debugger or a profiler. Files below /proc/self belong to
    root from now on, so that another user's process cannot write them. Programs that it starts are not affected.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_DUMPABLE)")


def reap_strangers(known: Callable[[int], Process | None]) -> None:
    """Reap every ended child, also adopted ones without a `Process`. For SIGCHLD's handler."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        process = known(ended.si_pid)
        if process is not None:
            process.reap()
        else:
            os.waitpid(ended.si_pid, 0)


def kill_strangers(
    timeout_s: float,
    but: Collection[int] = (),
    grace_s: float = 0.0,
    on_wait: Callable[[Collection[int], float], None] = lambda *_: None,
) -> None:
    """End and reap all children except `but`, and the orphans that these leave: SIGTERM, then SIGKILL, for up to `timeout_s`.

    `on_wait` is called once if some have not ended a moment after SIGTERM, with their numbers and the seconds that are left.
    For the end of the job, when all our own children were reaped. The others were adopted from workers.
    """
    quiet_until: float | None = time.monotonic() + _QUIET_S
    for number, limit_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, timeout_s)):
        due = time.monotonic() + limit_s
        asked: set[int] = set()
        while (strangers := children_of("self").difference(but)) and (now := time.monotonic()) < due:
            for pid in strangers - asked:
                with contextlib.suppress(*_OUT_OF_REACH):
                    os.kill(pid, number)
            asked = strangers
            if quiet_until is not None and now >= quiet_until:
                quiet_until = None
                on_wait(strangers, due - now)
            _reap_any(strangers, due if quiet_until is None else min(due, quiet_until))
        quiet_until = None


def title(pid: int) -> str:
    """Return the number of a process, and its name as the kernel knows it."""
    with contextlib.suppress(OSError):  # it has ended
        return f"{pid} ({Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()})"
    return str(pid)


def _reap_any(pids: Collection[int], due: float) -> None:
    """Reap those children that have ended, or the first that ends, but wait no longer than until `due`."""
    poll = select.poll()
    watched = {os.pidfd_open(pid): pid for pid in pids}  # they exist: nothing else reaps these children
    for pidfd in watched:
        poll.register(pidfd, select.POLLIN)
    for pidfd, _ in poll.poll(max(0.0, due - time.monotonic()) * 1000):
        os.waitpid(watched[pidfd], 0)
    for pidfd in watched:
        os.close(pidfd)


def _pidfds(pids: Iterable[int]) -> list[int]:
    found = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            found.append(os.pidfd_open(pid))
    return found


def _kill(pidfds: Collection[int]) -> None:
    for pidfd in pidfds:
        with contextlib.suppress(*_OUT_OF_REACH):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return -1


def _descendants() -> Iterator[int]:
    """Yield the children of this process, and theirs."""
    left = list(children_of("self"))
    while left:
        pid = left.pop()
        yield pid
        left += children_of(pid)


async def wait_gone(processes: Sequence[Process], timeout_s: float) -> None:
    """Wait up to `timeout_s` until all are reaped."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            for process in processes:
                await process.gone.wait()
