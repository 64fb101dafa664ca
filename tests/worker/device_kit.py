"""Shared by the conformance tests: ranks on the fake device, or on NCCL where there are two GPUs."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from kit.device import fake_device

from deadpool_run.worker.check import conformance
from deadpool_run.worker.device import choose

NCCL = pytest.param(
    "nccl",
    marks=[pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")],
)
on_both = pytest.mark.parametrize("kind", ["fake", NCCL])


class Device:
    """The interface that tests use of both devices."""

    def __init__(self, kind, member):
        self.fake = fake_device.use() if kind == "fake" else None
        if self.fake is None:
            torch.cuda.set_device(member.rank % torch.cuda.device_count())
        self.place = choose.device_backend().place()
        member.new_registry()

    @contextlib.contextmanager
    def host(self):
        """Send CPU tensors over Gloo in here: on the fake device, they are its own otherwise."""
        if self.fake is not None:
            self.fake.handles = lambda _: False
        yield
        if self.fake is not None:
            del self.fake.handles

    def full(self, value, *shape):
        return torch.full(shape or (4,), float(value), device=self.place)

    def check(self):
        """Assert that nothing was done that NCCL forbids: NCCL itself may hang or crash instead."""
        assert self.fake is None or self.fake.violations == []


def run(make_world, kind, target, *args, size=2):
    return make_world(size).run(target, kind, *args)


def reduced(device, value=1):
    tensor = device.full(value)
    dist.all_reduce(tensor)
    return tensor.tolist()


def played_again(member, device, calls):
    """Return the results of these calls, and those of a rehearsal that gets them from the transcript."""
    try:
        return conformance.played_again(member, calls)
    finally:
        device.check()
