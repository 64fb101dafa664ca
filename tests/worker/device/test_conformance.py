"""Differences between collectives on a device and Gloo's, on the fake device, and on NCCL where there are two GPUs.

tests/kit/device/fake_device.py names the source of each row, docs/gpu.md what each test shows.
"""

import gc
import os
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from device_kit import Device, on_both, played_again, reduced, run
from kit.world import FREED_S, LONG, TIMEOUT, later

from deadpool_run.errors import AttachError
from deadpool_run.worker.device import choose
from deadpool_run.worker.groups.registry import GroupState


def barriers(member, kind):
    device = Device(kind, member)
    member.start()
    number = device.place.index or 0
    dist.barrier(device_ids=[number])
    work = dist.barrier(device_ids=[number], async_op=True)
    work.wait()
    dist.barrier()
    assert device.fake is None or device.fake.launches == 3
    device.check()
    assert not member.registry.step_failed
    member.registry.shut_down()
    return member.failures


@on_both
def test_a_barrier_goes_where_its_device_ids_say(make_world, kind):
    assert run(make_world, kind, barriers) == [[], []]


def set_up(device, member):
    """Return what a rank received, in the order of issue."""
    other = 1 - member.rank
    seed = torch.tensor([7 + 10 * member.rank, member.rank], device=device.place)
    dist.broadcast(seed, src=0)
    peer = torch.zeros(2, dtype=torch.long, device=device.place)
    mine = torch.tensor([member.rank, 5], device=device.place)
    ops = [dist.P2POp(dist.isend, mine, other), dist.P2POp(dist.irecv, peer, other)]
    for work in dist.distributed_c10d.batch_isend_irecv(ops):
        work.wait()
    total = torch.tensor([member.rank + 1], device=device.place)
    work = dist.all_reduce(total, async_op=True)
    work.wait()
    dist.barrier(device_ids=[device.place.index or 0])
    last = torch.tensor([3 * (1 - member.rank)], device=device.place)
    dist.broadcast(last, src=0)
    return [seed.tolist(), peer.tolist(), total.tolist(), last.tolist()]


def recorded(member, kind):
    device = Device(kind, member)
    return played_again(member, device, lambda: set_up(device, member))


@on_both
def test_a_replacement_rehearses_with_what_synchronous_and_coalesced_collectives_received(make_world, kind):
    for rank, (got, again) in enumerate(run(make_world, kind, recorded)):
        assert got == [[7, 0], [1 - rank, 5], [3], [3]]
        assert again == got


def two_stuck(member, kind):
    device = Device(kind, member)
    member.start()
    groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([0, 1])]
    reduced(device)
    member.meet("ready")
    member.registry.begin_step()
    if member.rank == 0:
        works = [dist.all_reduce(device.full(1), group=group, async_op=True) for group in groups]
        with later(0.2, member.registry.abort):
            for work in works:
                work.wait()
            assert choose.device_backend().mark().wait(20)
    member.registry.abort()
    assert member.registry.step_failed
    member.registry.attach(member.store, "e2", TIMEOUT)
    member.registry.begin_step()
    total = [reduced(device)[0]]
    for group in groups[1:]:
        dist.all_reduce(tensor := device.full(2), group=group)
        total.append(tensor[0].item())
    device.check()
    member.registry.shut_down()
    return total


@on_both
def test_several_stuck_communicators_are_aborted_at_the_same_time(make_world, kind):
    assert run(make_world, kind, two_stuck) == [[2, 4, 4]] * 2


def cut_coalescing(member, kind):
    device = Device(kind, member)
    member.start()
    reduced(device)
    member.meet("ready")
    other = 1 - member.rank
    aborted = threading.Event()
    with dist.distributed_c10d._coalescing_manager(dist.group.WORLD, device.place, async_ops=True) as manager:
        dist.isend(device.full(1), other)
        thread = threading.Thread(target=lambda: (member.registry.abort(), aborted.set()))
        thread.start()
        thread.join()
        dist.irecv(device.full(1), other)
    manager.wait()
    member.meet("aborted")
    member.registry.attach(member.store, "e2", TIMEOUT)
    got = reduced(device)
    member.registry.abort()
    member.registry.attach(member.store, "e3", TIMEOUT)
    manager = dist.distributed_c10d._coalescing_manager(dist.group.WORLD, device.place)
    manager.__enter__()  # an exception of the script: torch does not end the coalescing then
    dist.isend(device.full(1), other)
    member.registry.abort()
    member.registry.attach(member.store, "e4", TIMEOUT)
    got += reduced(device)
    device.check()
    if device.fake is not None:
        assert device.fake.depth == 0
    member.registry.shut_down()
    return got


@on_both
def test_a_coalescing_that_an_abort_cuts_poisons_no_later_call(make_world, kind):
    assert run(make_world, kind, cut_coalescing) == [[2.0] * 8] * 2


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


def ends_first(member, kind):
    device = Device(kind, member)
    member.start()
    reduced(device)
    tensor = device.full(member.rank + 1, 1 << 16)
    if member.rank == 0:
        dist.all_reduce(tensor, async_op=True)
        member.store.set("issued", "1")
        member.registry.shut_down()
        device.check()
        return None
    member.store.wait(["issued"], TIMEOUT)
    threading.Event().wait(0.3)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    got = tensor.min().item(), tensor.max().item()
    member.registry.shut_down()
    device.check()
    return got


@on_both
def test_a_rank_that_ends_first_brings_its_collectives_to_their_end(make_world, kind):
    assert run(make_world, kind, ends_first)[1] == (3.0, 3.0)


def recovers_often(member, kind):
    device = Device(kind, member)
    member.start()
    tensors, sizes = [], []
    if device.fake is not None:  # as much as one epoch needs
        device.fake.memory_limit = device.fake.memory + (1 << 15)
    for epoch in range(2, 22):
        tensor = device.full(1, 1 << 12)
        tensors.append(weakref.ref(tensor))
        dist.all_reduce(tensor, async_op=True)  # nobody waits for it, as after an abort
        del tensor
        member.meet(f"issued{epoch}")
        member.registry.abort()
        member.registry.attach(member.store, f"e{epoch}", TIMEOUT)
        sizes.append(0 if device.fake is None else device.fake.memory)
    gc.collect()
    alive = sum(tensor() is not None for tensor in tensors)
    count = None if device.fake is None else len(device.fake.communicators)
    device.check()
    member.registry.shut_down()
    return alive, count, len(set(sizes))


@on_both
def test_nothing_of_past_epochs_stays_in_memory(make_world, kind):
    assert run(make_world, kind, recovers_often) in ([(0, 1, 1)] * 2, [(0, None, 1)] * 2)


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
    member.start()
    reduced(device)
    member.meet("ready")
    if member.rank == 1:
        os._exit(0)
    member.registry.begin_step()
    tensor = device.full(1)
    work = dist.all_reduce(tensor, async_op=True)
    mark = threading.Event()
    with later(0.3, lambda: (mark.set(), member.registry.abort())):
        work.wait()
        choose.device_backend().mark().wait(20)
    assert mark.is_set(), "it ended before the abort"
    assert member.registry.step_failed
    dist.all_reduce(after := device.full(1))
    device.check()
    return tensor.isnan().any().item(), after.tolist()


@on_both
def test_a_collective_whose_peer_is_lost_hangs_until_the_abort(make_world, kind):
    world = make_world(2)
    handles = world.start_all(loses_a_peer, kind)
    spoilt, after = handles[0].result()
    assert after == [1.0] * 4
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


def destroys(member, kind):
    device = Device(kind, member)
    member.start()
    group = dist.new_group([0, 1])
    reduced(device)
    if member.rank == 0:  # rank 1 is stuck and will never take part
        dist.all_reduce(device.full(1), group=group, async_op=True)
        with later(0.3, member.registry.abort):
            dist.destroy_process_group(group)
    device.check()
    member.meet("destroyed")
    return member.registry.state is GroupState.ABORTED


@on_both
def test_an_abort_frees_a_rank_that_destroys_a_group(make_world, kind):
    assert run(make_world, kind, destroys)[0]


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
