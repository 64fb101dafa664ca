"""A blocked event loop is named in the log; one that is in time is not."""

import asyncio
import os
import threading

from deadpool_run.agent.loop_watch import LoopWatch
from deadpool_run.agent.rendezvous import leader_file
from deadpool_run.coordinator.address import POINTER_NAME


def watch(body, limit_s, while_late=lambda: None):
    said = []

    async def main():
        watching = LoopWatch(limit_s, said.append, while_late)
        try:
            await body(watching)
        finally:
            watching.close()

    asyncio.run(main())
    return said


def test_the_call_that_blocked_the_loop_is_named_once(tmp_path):
    """A FIFO without a writer blocks the reading of a file. Only when the thread has seen that, somebody writes."""
    fifo = tmp_path / POINTER_NAME
    os.mkfifo(fifo)

    async def body(watching):
        said = asyncio.Event()
        watching._print_line = lambda line, print_line=watching._print_line: (print_line(line), said.set())

        def free():
            while not watching._found:
                os.sched_yield()
            fifo.write_bytes(b"")

        helper = threading.Thread(target=free)
        helper.start()
        assert leader_file.read(tmp_path) is None
        helper.join()
        await said.wait()

    (line,) = watch(body, 0.2)
    assert line.startswith("this agent answered no message for ")
    assert "s in agent/rendezvous/leader_file.py:" in line
    assert " read" in line


def test_a_loop_in_time_is_not_reported():
    async def body(_):
        for _ in range(100):
            await asyncio.sleep(0)

    assert watch(body, 600.0) == []


def test_a_thread_acts_while_the_loop_is_blocked_and_only_then():
    acted = threading.Event()

    async def body(_):
        await asyncio.sleep(0)
        assert not acted.is_set()
        assert acted.wait(30)  # the loop is blocked here

    watch(body, 0.1, acted.set)
