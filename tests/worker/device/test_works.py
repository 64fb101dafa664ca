"""Works of collectives on a device: what their waits raise, and that they count as writes."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from device_kit import Device, on_both, reduced, run

from deadpool_run.errors import RefusedError
from deadpool_run.worker.check.conformance import later
from deadpool_run.worker.compat.writes import all_writes_of
from deadpool_run.worker.groups.registry import GroupState


def times_out(member, kind):
    device = Device(kind, member)
    member.start()
    reduced(device)
    if member.rank == 0:
        work = dist.all_reduce(device.full(1), async_op=True)
        work.wait(timedelta(seconds=0.2))
        assert device.fake.communicators[0].aborted.is_set()
        assert member.registry.state is GroupState.ABORTED
    member.meet("timed out")
    return len(member.failures)


def test_a_wait_whose_timeout_is_over_aborts_the_communicator_and_starts_a_repair(make_world):
    """So nothing of ours may wait in slices, as for Gloo."""
    assert run(make_world, "fake", times_out) == [1, 0]


def polls(member, kind):
    device = Device(kind, member)
    member.start()
    reduced(device)
    if member.rank == 1:
        os._exit(9)
    kept = dist.all_reduce(device.full(1), async_op=True)
    future = kept.get_future()
    with later(0.3, member.registry.abort):
        dist.all_reduce(device.full(1), async_op=True).synchronize()
    future.wait()
    answers = kept.wait(), kept.is_completed(), member.registry.step_failed
    member.registry.begin_step()
    with pytest.raises(RefusedError, match="allreduce: this collective was issued in set-up"):
        kept.wait()
    device.check()
    return answers


@on_both
def test_works_of_an_aborted_collective_raise_nothing(make_world, kind):
    """`ProcessGroupNCCL2` raises in each of its waits, also for a collective that had ended."""
    world = make_world(2)
    handles = world.start_all(polls, kind)
    assert handles[0].result() == (True, True, True)
    handles[1].process.join()


def writes(member, kind):
    device = Device(kind, member)
    member.start()
    whole = device.full(1, 2, 4 << 10)
    before = all_writes_of(whole), all_writes_of(other := device.full(1))
    dist.all_gather_single(whole.view(-1), device.full(2, 4 << 10))
    assert before == (before[0], all_writes_of(other))
    assert all_writes_of(whole) != before[0]
    with device.host():
        dist.all_reduce(host := torch.ones(4 << 10))
    assert all_writes_of(host) > all_writes_of(torch.ones(2))
    device.check()
    member.registry.shut_down()
    return True


@on_both
def test_collectives_count_as_writes_to_their_outputs(make_world, kind):
    assert all(run(make_world, kind, writes))
