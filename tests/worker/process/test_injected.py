"""Injected faults of a process that goes on: its main thread runs out of memory."""

from types import SimpleNamespace

import pytest
import torch

from deadpool_run.wire.messages import OutOfMemoryNow
from deadpool_run.worker.groups.works import GuardedWork
from deadpool_run.worker.process.injected import inject


def test_the_main_thread_runs_out_of_memory_as_on_a_gpu_that_is_full():
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Injected by") as raised:
        inject(OutOfMemoryNow())
    assert (raised.type.__module__, raised.type.__name__) == ("torch", "OutOfMemoryError")


class Ended:
    """Gloo's part of a collective: it ends well, and while it is waited for the fault comes."""

    def wait(self, timeout=None):
        if timeout is not None:
            inject(OutOfMemoryNow())

    def is_completed(self):
        return True


def failed(error, *_, **__):
    raise error


def test_a_wait_for_a_collective_does_not_swallow_it():
    registry = SimpleNamespace(attempt_here=lambda: 0, check_attempt=lambda *_: None, failed=failed)
    group = SimpleNamespace(generation=1, registry=registry)
    work = GuardedWork(group, Ended(), SimpleNamespace(name="allreduce"), ())
    with pytest.raises(torch.OutOfMemoryError):
        work.wait()
