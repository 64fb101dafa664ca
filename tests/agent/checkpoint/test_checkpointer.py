"""A checkpointer whose process does not answer, and one that does not even die."""

import asyncio
import ctypes
import os
import signal
import subprocess
from contextlib import closing

import pytest

from deadpool_run.agent.checkpoint import checkpointer
from deadpool_run.agent.checkpoint.checkpointer import Checkpointers
from deadpool_run.agent.processes.children import Process
from deadpool_run.ids import Rank
from deadpool_run.vault.status_page import EMPTY
from deadpool_run.vault.vault import Vault
from deadpool_run.wire.checkpoints import TakeStep

ORDER = TakeStep("prepare", "/kept", "run", "one", 0, 2, 1, (0,), leads=True, ranks=(0,))
PTRACE_SEIZE, PTRACE_DETACH, PTRACE_O_TRACEEXIT = 0x4206, 17, 0x40


class FakeForkServer:
    """Makes processes that listen to nobody."""

    def __init__(self):
        self.made, self.theirs = [], []

    def fork(self, child):
        self.theirs += child.make_fds()
        self.made.append(subprocess.Popen(["sleep", "600"], process_group=0))
        child.forked(Process(self.made[-1].pid, child.exited))

    def close(self):
        for fd in self.theirs:
            os.close(fd)
        for process in self.made:
            process.kill()
            process.wait()


def ptrace(request, pid, data=0):
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if libc.ptrace(request, pid, None, data) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")


@pytest.fixture
def forkserver():
    made = FakeForkServer()
    yield made
    made.close()


async def answer(checkpointers):
    """Ask a new checkpointer; return what is heard of it."""
    heard = asyncio.get_running_loop().create_future()
    checkpointers.start([Rank(0)], heard.set_result).ask(ORDER)
    return (await asyncio.wait_for(heard, 10)).why


def test_one_that_does_not_answer_in_time_is_ended(forkserver):
    async def body():
        with closing(Vault(1)) as vault:
            vault.status_page.kept = 7
            checkpointers = Checkpointers(forkserver, vault, 0.2)
            assert "was not done within 0.2 s (--durable-timeout)" in await answer(checkpointers)
            assert vault.status_page.kept == EMPTY
            assert not checkpointers.stuck
            assert "was not done within" in await answer(checkpointers)
            assert len(forkserver.made) == 2

    asyncio.run(body())


def test_while_one_does_not_die_no_other_is_made(forkserver, monkeypatch):
    """As in the kernel's uninterruptible sleep: a process whose tracer does not let it exit."""
    monkeypatch.setattr(checkpointer, "_DEATH_S", 0.2)

    async def body():
        with closing(Vault(1)) as vault:
            checkpointers = Checkpointers(forkserver, vault, 0.2)
            heard = asyncio.get_running_loop().create_future()
            checkpointers.start([Rank(0)], heard.set_result).ask(ORDER)
            stuck = forkserver.made[0].pid
            try:
                ptrace(PTRACE_SEIZE, stuck, PTRACE_O_TRACEEXIT)
            except PermissionError:
                pytest.skip("ptrace is not allowed here")
            vault.status_page.kept = 7
            assert "was not done within 0.2 s" in (await asyncio.wait_for(heard, 10)).why
            assert vault.status_page.kept == EMPTY
            (left,) = checkpointers.stuck
            assert f"the process of an earlier attempt (pid {stuck}) does not end" in await answer(checkpointers)
            assert len(forkserver.made) == 1
            os.waitpid(stuck, os.WUNTRACED)  # noqa: ASYNC222 - it has stopped on its way out
            ptrace(PTRACE_DETACH, stuck, signal.SIGKILL)
            await asyncio.wait_for(left.gone.wait(), 10)
            assert "was not done within" in await answer(checkpointers)
            assert len(forkserver.made) == 2

    asyncio.run(body())
