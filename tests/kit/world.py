"""Real processes with deadpool groups, for tests. A fork server starts them, and waits for them have a bound."""

import contextlib
import gc
import multiprocessing
import os
import signal
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait

import torch
import torch.distributed as dist

from deadpool_run.agent.spec import DEFAULT_PRELOAD
from deadpool_run.worker.check.conformance import TIMEOUT, ConformanceRank

# Torch's stores look up the name of each peer. If no name server answers, do not wait long for it.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
LIMIT_S = float(os.environ.get("KIT_LIMIT_S", "60"))
LONG = timedelta(seconds=50)
"""A user's timeout that no test may reach."""
FREED_S = 5.0
"""The bound for a freed thread to continue. It is far below the timeout of a collective, even on a busy machine."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([*DEFAULT_PRELOAD, "torch.distributed.nn.functional", "kit.world"])


class Member(ConformanceRank):
    """The argument of a test's function in its process."""

    def __init__(self, port, rank, size, prefix, host="127.0.0.1"):
        store = dist.TCPStore(host, port, is_master=False, timeout=TIMEOUT)
        super().__init__(rank, store, size=size, prefix=prefix)

    def start(self, *, attached=True, backend="deadpool", timeout=TIMEOUT):
        """Become a member of the world, on deadpool groups or on plain Gloo for comparison."""
        if backend == "deadpool":
            super().start(attached=attached, timeout=timeout)
            return
        store = dist.PrefixStore("torch", self.store)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=timeout)
        self.meet("started")


def _main(pipe, place, target, args):
    gc.freeze()  # the collector would touch inherited objects, and thereby copy their pages
    torch.set_num_threads(1)
    try:
        result = (True, target(Member(*place), *args))
    except BaseException:  # noqa: BLE001 - sent to the test
        result = (False, traceback.format_exc())
    pipe.send(result)
    pipe.close()
    os._exit(0)


class Handle:
    """One process of a world."""

    def __init__(self, process, pipe):
        self.process, self.pipe = process, pipe

    def result(self, limit_s=LIMIT_S):
        """Return the result of the target. Fail with its traceback if it raised."""
        assert self.pipe.poll(limit_s), f"pid {self.process.pid} did not finish within {limit_s} s"
        ok, value = self.pipe.recv()
        assert ok, value
        self.process.join(LIMIT_S)
        assert self.process.exitcode == 0
        return value

    def kill(self):
        """Kill the process with SIGKILL, and wait for its end."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(LIMIT_S)
        assert self.process.exitcode == -signal.SIGKILL


def warm_up():
    """Start the fork server, and let libuv open what it keeps open after the first store. These are no leaks of a test."""
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    process = _context.Process(target=os.getpid)
    process.start()
    process.join(LIMIT_S)
    process.close()


class World:
    """The processes of one test and their store."""

    def __init__(self, size):
        self.size = size
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        self.handles = []

    def start(self, rank, target, *args, prefix="e1"):
        """Start one process."""
        return self._start(_main, (self.store.port, rank, self.size, prefix), target, args)

    def _start(self, main, *arguments):
        mine, theirs = _context.Pipe()
        process = _context.Process(target=main, args=(theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        handle = Handle(process, mine)
        self.handles.append(handle)
        return handle

    def start_all(self, target, *args):
        """Start one process per rank."""
        return [self.start(rank, target, *args) for rank in range(self.size)]

    def run(self, target, *args):
        """Run the target on every rank; return the results in the order of ranks."""
        handles = self.start_all(target, *args)
        pending = {handle.pipe: handle for handle in handles}
        results = {}
        while pending:
            ready = wait(list(pending), LIMIT_S)
            assert ready, f"{len(pending)} processes did not finish within {LIMIT_S} s"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                handle = pending.pop(pipe)
                results[id(handle)] = handle.result()
        return [results[id(handle)] for handle in handles]

    def close(self):
        """End all processes that still run."""
        for handle in self.handles:
            with contextlib.suppress(ProcessLookupError):
                if handle.process.exitcode is None:
                    os.kill(handle.process.pid, signal.SIGKILL)
            handle.process.join(LIMIT_S)
            handle.process.close()
            handle.pipe.close()
        self.handles.clear()
        self.store = None
