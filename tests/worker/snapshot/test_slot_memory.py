"""Slots that CUDA refuses to register: copies are slower, and no later call of torch reports the error."""

import contextlib
import os
from types import SimpleNamespace

import pytest
import torch

from deadpool_run.vault.segments import create_memory
from deadpool_run.worker.snapshot import slot_memory

HOST_MEMORY_ALREADY_REGISTERED, NOT_REGISTERED = 712, 713


class Runtime:
    """CUDA's runtime. A call that fails leaves its error, which torch reports after its next kernel, whatever that is."""

    def __init__(self):
        self.pending = 0

    def register(self, *_):
        self.pending = HOST_MEMORY_ALREADY_REGISTERED
        return self.pending

    def unregister(self, *_):
        self.pending = NOT_REGISTERED
        return self.pending

    def last_error(self):
        found, self.pending = self.pending, 0
        return found


@pytest.fixture
def runtime(monkeypatch):
    made = Runtime()
    cudart = SimpleNamespace(cudaHostRegister=made.register, cudaHostUnregister=made.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    libc = SimpleNamespace(madvise=slot_memory._LIBC.madvise, cudaGetLastError=made.last_error)
    monkeypatch.setattr(slot_memory, "_LIBC", libc)
    return made


def test_a_refused_registration_leaves_no_error(runtime):
    fd = create_memory("slot")
    memory = slot_memory.SlotMemory(fd, SimpleNamespace(by=lambda *_: contextlib.nullcontext()))
    memory.ensure(100, pin_for=torch.device("cuda", 0))
    assert (memory._pinned, runtime.pending) == (False, 0)
    memory._pinned = True
    memory.close()
    assert runtime.pending == 0
    os.close(fd)
