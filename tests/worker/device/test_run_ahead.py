"""The host is at most one step ahead of the device, and what it has ended there is known without waiting."""

import threading

import pytest
import torch
from kit.device.fake_device import FakeDevice
from kit.device.fake_streams import FakeEvent, FakeStream
from torch import nn

from deadpool_run.worker.device import choose
from deadpool_run.worker.device.run_ahead import RunAhead
from deadpool_run.worker.loop.updates import Updates
from deadpool_run.worker.snapshot.snapshot import Snapshots


def test_the_end_of_a_step_waits_for_the_step_before():
    device = FakeDevice()
    device.current = FakeStream("current")
    ahead = RunAhead(device)
    first, second = FakeEvent(), FakeEvent()
    assert ahead.ended
    device.current.wait_event(first)
    ahead.end_step(now=False)  # does not wait for its own work
    assert not ahead.ended
    device.current.wait_event(second)
    thread = threading.Thread(target=ahead.end_step, kwargs={"now": False})
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "it did not wait for the step before"
    first.record()
    thread.join(20)
    assert not thread.is_alive()
    assert not ahead.ended
    second.record()
    ahead.end_step(now=True)
    assert ahead.ended
    device.current.enqueue(None)
    device.current.join()


@pytest.fixture
def stepping(ahead):
    """An optimizer whose step a member's hook sees, on a stream of its own that the main one does not wait for."""
    side, gone, run_ahead = FakeStream("side"), FakeEvent(), RunAhead(ahead)
    parameter = nn.Parameter(torch.zeros(3))
    parameter.grad = torch.ones(3)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    updates = Updates(lambda *_: run_ahead.note(), lambda: None)

    def step():
        with ahead.on(side):
            optimizer.step()
            give(ahead, parameter, 7.0, gone)  # the stream's kernels: on a CPU, those of the optimizer have run

    yield parameter, step, gone, run_ahead
    gone.record()
    side.enqueue(None)
    side.join()
    updates.close()


def test_a_step_has_ended_only_when_the_streams_of_its_optimizers_have(stepping):
    _, step, gone, run_ahead = stepping
    step()
    run_ahead.end_step(now=False)
    assert not run_ahead._last.wait(0.2), "it has ended before the update"
    assert not run_ahead.ended
    gone.record()
    run_ahead.end_step(now=True)
    assert run_ahead.ended


def test_a_snapshot_has_what_an_optimizer_on_another_stream_writes(slots, stepping):
    parameter, step, gone, run_ahead = stepping
    snapshots = slots.own()
    snapshots.protect("model", nn.ParameterList([parameter]))
    snapshots.capture_now(0)
    step()
    run_ahead.end_step(now=False)
    snapshots.begin(1)
    thread = threading.Thread(target=snapshots.wait)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "it has copied what the update had not written"
    gone.record()
    thread.join(20)
    assert snapshots.held() == (0, 1)
    (written,) = slots.tensors(1).values()
    assert torch.frombuffer(bytearray(written), dtype=torch.float32).tolist() == [7.0] * 3


def test_without_a_device_nothing_waits():
    ahead = RunAhead(None)
    ahead.note()
    ahead.end_step(now=True)
    assert ahead.ended


@pytest.fixture
def ahead(monkeypatch):
    """A fake device whose current stream the test holds up."""
    device = FakeDevice()
    device.current = FakeStream("current")
    monkeypatch.setattr(choose, "_used", device)
    yield device
    device.current.enqueue(None)
    device.current.join()


def give(device, parameter, value, after):
    """Give the device work that it does after an event."""
    device.current.wait_event(after)
    device.current.enqueue(lambda: parameter.data.fill_(value))


def test_a_snapshot_is_of_what_the_device_has_written_by_the_end_of_its_step(slots, ahead):
    model, release = nn.Linear(4, 4), FakeEvent()
    snapshots = slots.own()
    snapshots.protect("model", model)
    snapshots.capture_now(0)
    give(ahead, model.weight, 7.0, release)
    snapshots.begin(1)  # the host is ahead: the device has not written yet
    release.record()
    snapshots.wait()
    assert snapshots.held() == (0, 1)
    assert set(
        torch.frombuffer(
            bytearray(next(raw for name, raw in slots.tensors(1).items() if "weight" in name)), dtype=torch.float32
        ).tolist()
    ) == {7.0}


def test_a_step_that_the_device_had_not_ended_when_an_abort_began_is_no_snapshot(slots, ahead):
    model, release, interrupted = nn.Linear(4, 4), FakeEvent(), threading.Event()
    snapshots = slots.own(interrupted=interrupted.is_set)
    snapshots.protect("model", model)
    snapshots.capture_now(0)
    give(ahead, model.weight, float("nan"), release)  # what an aborted collective leaves
    snapshots.begin(1)
    interrupted.set()  # before the first abort
    release.record()
    snapshots.wait(cancel_pending=False)
    assert snapshots.held() == (0,)


@pytest.mark.parametrize("put", [Snapshots.rewind, Snapshots.restore])
def test_what_an_interrupted_step_has_left_to_the_device_does_not_write_after_a_repair(slots, ahead, monkeypatch, put):
    """A script may give a part of its step to a stream that is not the one of our own copies."""
    model, release = nn.BatchNorm1d(4), FakeEvent()
    snapshots = slots.own()
    snapshots.protect("model", model)
    snapshots.capture_now(0)
    give(ahead, model.running_mean, 7.0, release)
    mark = ahead.mark
    monkeypatch.setattr(ahead, "mark", lambda: release.record() or mark())  # the device goes on once we wait for it
    put(snapshots, 0)
    ahead.mark().wait()
    assert model.running_mean.tolist() == [0.0] * 4
