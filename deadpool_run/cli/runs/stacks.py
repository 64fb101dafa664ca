"""Asks a worker on this machine for the stacks of its threads, without stopping it."""

import os
import time
from pathlib import Path

from deadpool_run.errors import DeadpoolError
from deadpool_run.wire.stacks import STACK_MEMORY, STACK_SIGNAL

_ANSWER_S = 5.0
_LOOK_AGAIN_S = 0.02
_QUIET_LOOKS = 3
"""Looks without a further line after which the answer is complete."""


class NoStackError(DeadpoolError):
    """The worker did not write its stacks."""


def stacks_of(pid: int | None) -> str:
    """Return the stacks of all threads of a worker, the most recent call first. Raises `NoStackError`."""
    if pid is None:
        raise NoStackError("no worker has this rank now")
    memory = _memory_of(pid)
    with memory.open("rb") as file:
        before = file.seek(0, os.SEEK_END)
        try:
            os.kill(pid, STACK_SIGNAL)
        except ProcessLookupError as error:
            raise NoStackError("its process has ended") from error
        text, quiet, until = b"", 0, time.monotonic() + _ANSWER_S
        while quiet < _QUIET_LOOKS and time.monotonic() < until:
            time.sleep(_LOOK_AGAIN_S)
            file.seek(before)
            found = file.read()
            quiet = quiet + 1 if found == text and found else 0
            text = found
    if not text:
        raise NoStackError(f"it did not answer within {_ANSWER_S:g} s: its process is in state {_state(pid)!r} (ps(1))")
    return text.decode(errors="replace")


def _memory_of(pid: int) -> Path:
    """Return the worker's memory for stacks. The signal would end a process that does not handle it."""
    process = Path("/proc") / str(pid)
    try:
        status = (process / "status").read_text(encoding="utf-8", errors="replace").splitlines()
        caught = next(line for line in status if line.startswith("SigCgt:"))
        if int(caught.split()[1], 16) >> (STACK_SIGNAL - 1) & 1:
            for handle in (process / "fd").iterdir():
                if f"memfd:deadpool-{STACK_MEMORY}" in str(handle.readlink()):
                    return handle
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NoStackError("its process has ended") from error
    except (OSError, StopIteration) as error:
        raise NoStackError(f"its process cannot be read: {error}") from error
    raise NoStackError("its process does not handle the request: it was started with spawn or --no-python")


def _state(pid: int) -> str:
    import psutil  # noqa: PLC0415 - help and status don't need it

    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "ended"
