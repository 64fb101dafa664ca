"""Scalers in snapshots: their state is that of the device, and read without a wait for it."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from deadpool_run.worker.compat import scalers
from deadpool_run.worker.snapshot.snapshot import Snapshots


@pytest.fixture
def snapshots(slots):
    return slots.own()


class TrainState:
    def __init__(self, scaler):
        self.parts = {"scaler": scaler}

    def state_dict(self):
        return {"scaler": self.parts["scaler"].state_dict()}

    def load_state_dict(self, state):
        self.parts["scaler"].load_state_dict(state["scaler"])


@pytest.mark.parametrize("holder", [lambda scaler: scaler, TrainState])
@pytest.mark.parametrize("put", [Snapshots.rewind, Snapshots.restore])
def test_a_scaler_forgets_a_step_that_was_cut(snapshots, put, holder):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    snapshots.protect("scaler", holder(scaler))
    snapshots.capture_now(0)
    scaler.scale(model(torch.ones(2)).sum()).backward()
    scaler.unscale_(optimizer)  # and the optimizer's step is not reached
    put(snapshots, 0)
    scaler.unscale_(optimizer)  # it would refuse


class Waiting(TorchDispatchMode):
    """Reads of the host, each of which would wait for a device."""

    reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("put", [Snapshots.rewind, Snapshots.restore])
def test_a_scaler_is_read_without_a_wait_for_its_device(snapshots, put):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    snapshots.protect("scaler", scaler)

    def step():
        scaler.scale(model(torch.ones(2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    step()
    before = scaler.state_dict()
    with Waiting() as waiting:
        snapshots.begin(0)
    assert not waiting.reads
    snapshots.capture_now(0)
    assert scalers.state_of(scaler).keys() == before.keys()
    step()
    assert scaler.state_dict() != before
    put(snapshots, 0)
    assert scaler.state_dict() == before
    assert type(scaler._init_scale) is float
    assert type(scaler._init_growth_tracker) is int


@pytest.mark.parametrize("options", [{"enabled": False}, {}])
def test_a_scaler_that_is_disabled_or_not_yet_used_is_kept(snapshots, options):
    scaler = torch.amp.GradScaler("cpu", **options)
    before = scaler.state_dict()
    snapshots.protect("scaler", scaler)
    snapshots.capture_now(0)
    snapshots.restore(0)
    assert scaler.state_dict() == before
