"""A process that is slowed: next to one that is not, on the same machine at the same time."""

import asyncio
import signal
import subprocess
import sys

import psutil
import pytest

from deadpool_run.agent.processes.children import Process
from deadpool_run.agent.processes.slowdown import Slowdown

TICKING = """
import os, time
while True:
    time.sleep(0.002)
    os.write(1, b".")
"""
"""Progress that needs time and hardly any CPU: other programs on the machine hold up both processes alike."""
TICKS = 500


class Pair:
    """Two processes that make the same progress unless one is slowed."""

    def __init__(self, folder):
        self._files = [folder / "slow", folder / "other"]
        self.children = []
        for path in self._files:
            with path.open("wb") as file:
                self.children.append(subprocess.Popen([sys.executable, "-c", TICKING], stdout=file))

    async def begun(self):
        while not all(self._ticks()):  # noqa: ASYNC110 - nothing tells of a file's growth
            await asyncio.sleep(0.01)

    def _ticks(self):
        return [path.stat().st_size for path in self._files]

    async def progress(self):
        """Return how far the slow process comes while the other makes this many ticks."""
        slow, other = self._ticks()
        while self._ticks()[1] < other + TICKS:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        return (self._ticks()[0] - slow) / TICKS


@pytest.fixture
def pair(tmp_path):
    made = Pair(tmp_path)
    yield made
    for child in made.children:
        child.kill()
        child.wait()


def run(pair, test):
    async def with_process():
        await pair.begun()
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
        assert await pair.progress() < 0.5
        slowdown.close()
        assert await pair.progress() > 0.7

    run(pair, test)


@pytest.mark.timeout(300)
def test_it_ends_by_itself_and_leaves_the_process_running(pair):
    async def test(process):
        Slowdown(process, 50.0, 0.5, lambda: False)
        await asyncio.sleep(0.6)
        assert await pair.progress() > 0.7

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
