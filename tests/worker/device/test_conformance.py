"""Differences between collectives on a device and Gloo's, on the fake device, and on NCCL where there are two GPUs.

tests/kit/device/fake_device.py names the source of each row, docs/gpu.md what each test shows.
"""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from device_kit import Device, on_both, reduced, run
from kit.world import FREED_S, LONG, TIMEOUT

from deadpool_run.errors import AttachError
from deadpool_run.worker.check import conformance
from deadpool_run.worker.check.conformance import later
from deadpool_run.worker.device import channel
from deadpool_run.worker.groups.registry import GroupState


def as_shipped(member, kind, name):
    """Run a behaviour of `doctor --gpu`, which raises if it was another one."""
    device = Device(kind, member)
    try:
        conformance.BEHAVIOURS[name](member, device.place)
    finally:
        device.check()
    member.registry.shut_down()


def barriers(member, kind):
    device = Device(kind, member)
    channel._INSIDE_S = 2 * TIMEOUT.total_seconds()  # an abort that waits for a host in a barrier takes this long
    conformance.barrier(member, device.place)
    assert device.fake is None or device.fake.launches == (5 if member.rank == 0 else 4)
    device.check()
    member.registry.shut_down()
    return member.failures


@on_both
def test_a_barrier_goes_where_its_device_ids_say(make_world, kind):
    assert run(make_world, kind, barriers) == [[], []]


@on_both
def test_a_replacement_rehearses_with_what_synchronous_and_coalesced_collectives_received(make_world, kind):
    run(make_world, kind, as_shipped, "recorded")


@on_both
def test_several_stuck_communicators_are_aborted_at_the_same_time(make_world, kind):
    run(make_world, kind, as_shipped, "stuck")


def cut_coalescing(member, kind):
    device = Device(kind, member)
    try:
        conformance.coalescing(member, device.place)
    finally:
        device.check()
    if device.fake is not None:
        assert device.fake.depth == 0
    member.registry.shut_down()


@on_both
def test_a_coalescing_that_an_abort_cuts_poisons_no_later_call(make_world, kind):
    run(make_world, kind, cut_coalescing)


def held_inside(member, kind):
    device = Device(kind, member)
    member.start()
    reduced(device)
    entered, abort = threading.Event(), threading.Event()

    def stay():
        device.fake.inside = lambda: None
        entered.set()
        abort.wait(10)
        threading.Event().wait(0.2)

    device.fake.inside = stay

    def order():
        entered.wait(10)
        member.registry.abort()
        abort.set()

    thread = threading.Thread(target=order)
    thread.start()
    member.registry.begin_step()
    work = dist.all_reduce(device.full(1), async_op=True)
    work.wait()
    thread.join()
    assert member.registry.step_failed
    member.registry.attach(member.store, "e2", TIMEOUT)
    got = reduced(device)
    device.check()
    member.registry.shut_down()
    return got


def test_an_abort_waits_for_the_call_that_is_inside(make_world):
    assert run(make_world, "fake", held_inside) == [[2.0] * 4] * 2


def connecting(member, kind):
    device = Device(kind, member)
    member.start()
    registry = member.registry
    assert [each.connected for each in device.fake.communicators] == [True], "it was not connected with the group"
    registry.abort()
    connects, lost = threading.Event(), threading.Event()

    def connect():
        connects.set()
        if member.rank == 1:  # rank 0 waits for its address, and nothing cancels that wait
            lost.wait(20)

    device.fake.slow_connect = connect

    def lose():
        connects.wait(20)
        member.meet("connecting")
        registry.abort()

    thread = threading.Thread(target=lose)
    thread.start()
    began = time.monotonic()
    with pytest.raises(AttachError, match="lost while"):
        registry.attach(member.store, "e2", TIMEOUT)
    taken = time.monotonic() - began
    thread.join()
    lost.set()
    assert registry.state is GroupState.ABORTED
    member.meet("freed")
    device.fake.slow_connect = lambda: None
    registry.attach(member.store, "e3", TIMEOUT)
    got = reduced(device)
    device.check()
    registry.shut_down()
    return taken < TIMEOUT.total_seconds() / 2, got


def test_a_loss_frees_a_rank_that_connects_on_the_device(make_world):
    assert run(make_world, "fake", connecting) == [(True, [2.0] * 4)] * 2


@on_both
def test_a_rank_that_ends_first_brings_its_collectives_to_their_end(make_world, kind):
    run(make_world, kind, as_shipped, "ends-first")


def recovers_often(member, kind):
    device = Device(kind, member)
    start, attach, sizes = member.start, member.registry.attach, []

    def start_with_a_limit():
        start()
        if device.fake is not None:  # as much as one epoch needs
            device.fake.memory_limit = device.fake.memory + (1 << 15)

    def attach_and_note(*args):
        attach(*args)
        sizes.append(0 if device.fake is None else device.fake.memory)

    member.start, member.registry.attach = start_with_a_limit, attach_and_note
    conformance.recovers_often(member, device.place)
    count = None if device.fake is None else len(device.fake.communicators)
    device.check()
    member.registry.shut_down()
    return count, len(set(sizes))


@on_both
def test_nothing_of_past_epochs_stays_in_memory(make_world, kind):
    assert run(make_world, kind, recovers_often) in ([(1, 1)] * 2, [(None, 1)] * 2)


def has_no_memory(member, kind):
    """Return what each attempt of a script that runs again says, and what collectives give in the end."""
    device = Device(kind, member)
    member.start()
    reduced(device)
    needs = device.fake.memory
    member.registry.shut_down()
    dist.destroy_process_group()
    free = device.fake.memory
    member.meet("left")
    device.fake.memory_limit = needs - 1  # the script's second run has left it less
    member.new_registry()
    member.start(attached=False)
    with pytest.raises(AttachError) as error:
        member.registry.attach(member.store, "e2", TIMEOUT)
    member.meet("failed")
    device.fake.memory_limit = needs
    member.registry.attach(member.store, "e3", TIMEOUT)
    got = reduced(device)
    device.check()
    member.registry.shut_down()
    return free, str(error.value), got


def test_a_script_that_runs_again_without_memory_for_a_communicator_says_so(make_world):
    for free, said, got in run(make_world, "fake", has_no_memory):
        assert free == 0
        assert "communicators could not be connected" in said
        assert "out of memory" in said
        assert got == [2.0] * 4


def aborts_late(member, kind):
    device = Device(kind, member)
    member.start()
    go = threading.Event()
    device.fake.aborting = lambda _: go.wait(20)
    member.registry.abort()
    with pytest.raises(AttachError, match="abort of 1 of 1 communicators"):
        member.registry.attach(member.store, "e2", timedelta(seconds=0.3))
    go.set()
    member.meet("late")
    member.registry.attach(member.store, "e3", TIMEOUT)
    got = reduced(device)
    device.check()
    member.registry.shut_down()
    return got


def test_a_rank_whose_abort_is_late_does_not_attach(make_world):
    assert run(make_world, "fake", aborts_late) == [[2.0] * 4] * 2


def loses_a_peer(member, kind):
    device = Device(kind, member)
    tensor = conformance.lost_peer(member, device.place)
    device.check()
    return tensor.isnan().any().item()


@on_both
def test_a_collective_whose_peer_is_lost_hangs_until_the_abort(make_world, kind):
    world = make_world(2)
    handles = world.start_all(loses_a_peer, kind)
    spoilt = handles[0].result()
    assert spoilt or kind == "nccl"  # which leaves any bytes
    handles[1].process.join()


def asks(member, kind):
    device = Device(kind, member)
    member.start()
    options = {"priority": "high"}
    dist.new_group([0, 1], backend="nccl", pg_options=options)
    host = dist.new_group([0, 1], backend="gloo")
    dist.all_reduce(tensor := torch.ones(2), group=host)
    specs = [communicator.spec for communicator in device.fake.communicators]
    dist.destroy_process_group(host)
    device.check()
    member.registry.shut_down()
    return [spec.options for spec in specs], tensor.tolist()


def test_a_groups_own_options_reach_the_library_and_gloo_groups_stay_on_the_host(make_world):
    assert run(make_world, "fake", asks) == [([None, {"priority": "high"}], [2.0, 2.0])] * 2


@on_both
def test_an_abort_frees_a_rank_that_destroys_a_group(make_world, kind):
    run(make_world, kind, as_shipped, "destroys")


def creates_late(member, kind):
    """A library's own limit for connecting begins only when all members of a new group are there."""
    device = Device(kind, member)
    member.start(timeout=LONG)
    complete = []
    device.fake.slow_connect = lambda: complete.append(member.store.check(["creates"]))
    member.meet("ready")
    if member.rank == 1:
        threading.Event().wait(0.5)
        member.store.set("creates", "1")
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor := device.full(1), group=group)
    device.check()
    member.registry.shut_down()
    return complete, tensor.tolist()


def test_members_of_a_new_group_connect_when_all_of_them_are_there(make_world):
    assert run(make_world, "fake", creates_late) == [([True], [2.0] * 4)] * 2


def lost_before_a_new_group(member, kind):
    device = Device(kind, member)
    member.start(timeout=LONG)
    member.meet("ready")
    if member.rank == 1:
        member.store.wait(["freed"], TIMEOUT)
        return True
    with later(0.3, member.registry.abort) as aborted:
        dist.new_group([0, 1])
    taken = time.monotonic() - aborted[0]
    member.store.set("freed", "1")
    device.check()
    return taken < FREED_S and member.registry.state is GroupState.ABORTED


def test_a_loss_frees_a_rank_that_waits_for_the_members_of_a_new_group(make_world):
    assert run(make_world, "fake", lost_before_a_new_group) == [True, True]
