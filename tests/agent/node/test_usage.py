"""CPU time, memory and GPU of ranks, sampled from real processes."""

import asyncio
import os
import subprocess
import sys
from contextlib import closing

import psutil
import pytest

from deadpool_run.agent.node.gpus import GpuUse
from deadpool_run.agent.node.usage import UsageSampler
from deadpool_run.vault.status_page import EMPTY, StatusPage, create_status_page

BUSY_S = 0.3
CHILD = f"""
import sys, time
data = b"x" * (65 << 20)
print("ready", flush=True)
for line in sys.stdin:
    end = time.process_time() + {BUSY_S}
    while time.process_time() < end:
        pass
    print("done", flush=True)
"""


@pytest.fixture
def child():
    with subprocess.Popen(
        [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()


@pytest.fixture
def page():
    with closing(StatusPage(create_status_page(3), 3)) as page:
        yield page
    os.close(page.fd)


def be_busy(child):
    child.stdin.write("go\n")
    assert child.stdout.readline() == "done\n"


def cpu_s(pid):
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def sampled(page, processes, look, gpu=lambda _: None):
    """Call `look` with a sampler in a running loop."""

    async def main():
        with closing(UsageSampler(lambda: iter(processes), lambda: page, gpu)) as sampler:
            look(sampler)

    asyncio.run(main())


def test_a_sample_is_what_the_process_used_since_the_last_one(child, page):
    def look(sampler):
        entry = page.rank_entries[1]
        sampler.sample(100.0)
        assert (entry.cpu_millis, entry.gpu_percent, entry.gpu_memory) == (EMPTY, EMPTY, EMPTY)
        assert entry.memory > 64 << 20
        before_s = cpu_s(child.pid)
        be_busy(child)
        sampler.sample(100.5)
        assert entry.cpu_millis == pytest.approx(1000 * (cpu_s(child.pid) - before_s) / 0.5, abs=1)
        assert entry.cpu_millis >= 1000 * (BUSY_S - 0.02) / 0.5  # the kernel counts in hundredths
        sampler.sample(110.5)
        assert entry.cpu_millis == 0
        assert page.rank_entries[0].memory == page.rank_entries[2].memory == EMPTY

    sampled(page, [(1, 0, child.pid)], look)


def test_a_replacement_begins_anew_and_an_ended_process_is_passed_over(child, page):
    processes = [(0, 0, child.pid)]

    def look(sampler):
        sampler.sample(0.0)
        be_busy(child)
        child.kill()
        child.wait()
        sampler.sample(1.0)
        assert page.rank_entries[0].cpu_millis == EMPTY
        page.rank_entries[0].clear(keep_slots=True)
        assert page.rank_entries[0].memory == EMPTY
        processes[0] = (0, 0, os.getpid())
        sampler.sample(2.0)
        assert (page.rank_entries[0].cpu_millis, page.rank_entries[0].memory > 0) == (EMPTY, True)

    sampled(page, processes, look)


def test_the_gpu_is_that_of_the_local_rank(page):
    uses = {0: GpuUse(5, 1 << 30), 1: GpuUse(None, 2 << 30)}

    def look(sampler):
        sampler.sample(0.0)
        found = [(entry.gpu_percent, entry.gpu_memory) for entry in page.rank_entries]
        assert found == [(EMPTY, 2 << 30), (5, 1 << 30), (EMPTY, EMPTY)]

    here = os.getpid()
    sampled(page, [(0, 1, here), (1, 0, here), (2, 2, here)], look, uses.get)
