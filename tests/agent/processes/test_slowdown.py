"""A process that is slowed: next to one that is not, on the same machine at the same time."""

import asyncio
import os
import signal
import subprocess
import sys

import psutil
import pytest

from deadpool_run.agent.processes.children import Process
from deadpool_run.agent.processes.slowdown import Slowdown

BUSY = "while True: pass"


class Pair:
    """Two busy processes on one CPU, which share it equally unless one is slowed."""

    def __init__(self):
        self.children = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
        for child in self.children:
            os.sched_setaffinity(child.pid, {min(os.sched_getaffinity(0))})

    def work_s(self):
        times = [psutil.Process(child.pid).cpu_times() for child in self.children]
        return [each.user + each.system for each in times]

    async def work_while(self, seconds):
        before = self.work_s()
        while sum(now - then for now, then in zip(self.work_s(), before, strict=True)) < seconds:  # noqa: ASYNC110 - nothing tells of CPU time
            await asyncio.sleep(0.01)
        return [now - then for now, then in zip(self.work_s(), before, strict=True)]


@pytest.fixture
def pair():
    made = Pair()
    yield made
    for child in made.children:
        child.kill()
        child.wait()


def run(pair, test):
    async def with_process():
        process = Process(pair.children[0].pid, lambda _: None)
        await test(process)
        process.signal(signal.SIGKILL)
        async with asyncio.timeout(30):
            await process.gone.wait()

    asyncio.run(with_process())


@pytest.mark.timeout(300)
def test_a_slow_process_does_less_than_one_beside_it_and_as_much_afterwards(pair):
    async def test(process):
        slowdown = Slowdown(process, 4.0, 600.0, lambda: False)
        slow, other = await pair.work_while(2.0)
        assert slow < 0.5 * other
        slowdown.close()
        slow, other = await pair.work_while(2.0)
        assert slow > 0.7 * other

    run(pair, test)


@pytest.mark.timeout(300)
def test_it_ends_by_itself_and_leaves_the_process_running(pair):
    async def test(process):
        Slowdown(process, 50.0, 0.5, lambda: False)
        await asyncio.sleep(0.6)
        slow, other = await pair.work_while(2.0)
        assert slow > 0.7 * other

    run(pair, test)


def test_a_suspended_process_is_not_woken(pair):
    async def test(process):
        suspended = True
        slowdown = Slowdown(process, 3.0, 600.0, lambda: suspended)
        process.signal(signal.SIGSTOP)
        await asyncio.sleep(0.5)
        assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        suspended = False
        slowdown.close()
        while psutil.Process(process.pid).status() == psutil.STATUS_STOPPED:  # noqa: ASYNC110 - a signal is on its way
            await asyncio.sleep(0.01)

    run(pair, test)


def test_the_end_of_the_process_ends_it(pair):
    async def test(process):
        Slowdown(process, 3.0, 600.0, lambda: False)
        process.signal(signal.SIGKILL)
        async with asyncio.timeout(30):
            await process.gone.wait()
        await asyncio.sleep(0.3)  # a stop that came now would be of nobody

    run(pair, test)
