"""The host is at most one step ahead of the device, and what it has ended there is known without waiting."""

import threading

from kit.fake_device import FakeDevice, FakeEvent, FakeStream

from deadpool_run.worker.device.run_ahead import RunAhead


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


def test_without_a_device_nothing_waits():
    ahead = RunAhead(None)
    ahead.end_step(now=True)
    assert ahead.ended
