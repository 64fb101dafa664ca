"""Gloo's connections in a job on a device: none until a CPU collective needs them, also across losses."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from device_kit import Device, on_both, played_again, reduced, run
from kit.world import FREED_S, TIMEOUT

from deadpool_run.worker.groups import gloo
from deadpool_run.worker.groups.registry import GroupState
from deadpool_run.worker.verify import agreement


class Counting(Device):
    """A device, and how often this process has connected Gloo for a group of its registry."""

    def __init__(self, kind, member):
        super().__init__(kind, member)
        self.meshes = 0
        self.connecting = lambda: None
        plain = gloo.Device.connect

        def connect(this, *args, **kwargs):
            if this is member.registry._gloo_device:  # a communicator of the fake device has another one
                self.meshes += 1
                self.connecting()
            return plain(this, *args, **kwargs)

        gloo.Device.connect = connect

    def on_host(self, value=1, group=None):
        with self.host():
            dist.all_reduce(tensor := torch.full((4,), float(value)), group=group)
        return tensor[0].item()


def lose(member, epoch):
    """A loss, as all members but the lost one see it."""
    member.meet(f"before {epoch}")
    member.registry.abort()
    member.registry.attach(member.store, epoch, TIMEOUT)


def uses_none(member, kind):
    device = Counting(kind, member)
    member.start()
    pair = dist.new_group([0, 1])
    got = []
    for epoch in ("e2", "e3"):
        got += reduced(device)[:1]
        dist.all_reduce(tensor := device.full(2), group=pair)
        got.append(tensor[0].item())
        dist.barrier(device_ids=[device.place.index or 0])
        lose(member, epoch)
    device.check()
    member.registry.shut_down()
    return got, device.meshes


@on_both
def test_a_job_without_cpu_collectives_never_connects_gloo(make_world, kind):
    assert run(make_world, kind, uses_none) == [([2.0, 4.0] * 2, 0)] * 2


def uses_later(member, kind, epoch):
    """Return what CPU collectives return, and the meshes before the first one, after it, after a loss, and after a new group."""
    device = Counting(kind, member)
    member.start()
    pair = dist.new_group([0, 1])
    if epoch > 1:
        lose(member, "e2")
    reduced(device)
    meshes = [device.meshes]
    member.meet("noted")
    got = [device.on_host(3), device.on_host(1, pair)]
    meshes.append(device.meshes)
    lose(member, "e9")
    meshes.append(device.meshes)
    got += [device.on_host(4), *reduced(device)[:1]]
    other = dist.new_group([0, 1])
    got.append(device.on_host(5, other))
    meshes.append(device.meshes)
    assert not member.registry.step_failed
    device.check()
    member.registry.shut_down()
    return got, meshes, member.failures


@on_both
@pytest.mark.parametrize("epoch", [1, 2])
def test_the_first_cpu_collective_connects_every_group_and_later_attaches_do(make_world, kind, epoch):
    assert run(make_world, kind, uses_later, epoch) == [([6.0, 2.0, 8.0, 2.0, 10.0], [0, 2, 4, 5], [])] * 2


def sends_between_two(member, kind):
    """Two of three ranks exchange a CPU tensor; the script of the third is elsewhere."""
    device = Counting(kind, member)
    member.start()
    got = torch.zeros(2)
    with device.host():
        if member.rank == 0:
            dist.send(torch.tensor([1.0, 2.0]), 1)
        elif member.rank == 1:
            dist.recv(got, 0)
    member.meet("sent")
    device.check()
    return got.tolist(), device.meshes


def test_a_send_needs_no_script_but_those_of_its_two_ranks(make_world):
    assert run(make_world, "fake", sends_between_two, size=3) == [([0, 0], 1), ([1, 2], 1), ([0, 0], 1)]


def crosses(member, kind):
    """Use two groups for the first time, in another order on each rank."""
    device = Counting(kind, member)
    member.start()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    order = groups if member.rank == 0 else groups[::-1]
    tensors = {group: torch.full((4,), 1.0) for group in groups}
    with device.host():
        works = [dist.all_reduce(tensors[group], group=group, async_op=True) for group in order]
        for work in works:
            work.wait()
    device.check()
    return [tensors[group][0].item() for group in groups]


def test_groups_may_be_used_first_in_another_order_on_each_rank(make_world):
    assert run(make_world, "fake", crosses) == [[2.0, 2.0]] * 2


def ends_early(member, kind):
    device = Counting(kind, member)
    member.start()
    pair = dist.new_group([0, 1])
    if member.rank == 2:
        member.registry.shut_down()
    member.meet("ended")
    got = None if member.rank == 2 else device.on_host(1, pair)
    member.meet("used")
    device.check()
    return got


def test_a_rank_that_has_ended_keeps_no_other_group_from_connecting(make_world):
    assert run(make_world, "fake", ends_early, size=3) == [2.0, 2.0, None]


def is_lost_meanwhile(member, kind):
    """A loss while Gloo connects: rank 1 has not begun, and rank 0 waits for it."""
    device = Counting(kind, member)
    member.start()
    registry = member.registry
    registry.begin_step()
    connects, freed = threading.Event(), threading.Event()

    def connect():
        connects.set()
        if member.rank == 1:
            freed.wait(TIMEOUT.total_seconds())

    device.connecting = connect
    got = []
    moments = []

    def lose():
        assert connects.wait(TIMEOUT.total_seconds())
        member.meet("connecting")
        moments.append(time.monotonic())
        registry.abort()

    thread = threading.Thread(target=lose)
    thread.start()
    if member.rank == 0:
        got.append(device.on_host())
        freed_at = time.monotonic()
        assert registry.step_failed
    thread.join()
    assert member.rank or freed_at - moments[0] < FREED_S
    member.meet("freed")
    freed.set()
    device.connecting = lambda: None
    registry.attach(member.store, "e2", TIMEOUT)
    before = device.meshes
    got.append(device.on_host(2))
    assert device.meshes == before, "the attach had connected it"
    got += reduced(device)[:1]
    device.check()
    registry.shut_down()
    return got, member.failures, registry.state is GroupState.ABORTED


def test_a_loss_frees_a_rank_that_waits_for_gloo_and_the_next_attach_connects_it(make_world):
    first, second = run(make_world, "fake", is_lost_meanwhile)
    assert first == ([1.0, 4.0, 2.0], [], True)
    assert second == ([4.0, 2.0], [], True)


def cannot_connect(member, kind):
    device = Counting(kind, member)
    member.start()
    member.registry.begin_step()

    def refuse():
        if member.rank == 0:
            raise RuntimeError("no route to host")

    device.connecting = refuse
    got = device.on_host(3) if member.rank == 0 else None
    state, failed = member.registry.state, member.registry.step_failed
    member.meet("refused")
    device.connecting = lambda: None
    member.registry.abort()
    member.registry.attach(member.store, "e2", TIMEOUT)
    again = device.on_host(3)
    member.registry.shut_down()
    return got, state, failed, member.failures, again


def test_gloo_that_cannot_connect_starts_a_repair(make_world):
    first, second = run(make_world, "fake", cannot_connect)
    why = "group '0': Gloo could not be connected: communicators could not be connected: no route to host"
    assert first == (3.0, GroupState.ABORTED, True, [why], 6.0)
    assert second == (None, GroupState.ATTACHED, False, [], 6.0)


def calls(device):
    """Return what a rank received, over Gloo and on the device."""
    with device.host():
        dist.broadcast(seed := torch.tensor([7 + 10 * dist.get_rank()]), src=0)
    dist.broadcast(second := torch.tensor([1 + dist.get_rank()], device=device.place), src=1)
    with device.host():
        dist.all_gather_object(names := [None, None], f"rank {dist.get_rank()}")
    return seed.item(), second.item(), names


def recorded(member, kind):
    device = Counting(kind, member)
    return played_again(member, device, lambda: calls(device))


def test_a_replacement_rehearses_with_what_the_first_cpu_collective_received(make_world):
    for got, again in run(make_world, "fake", recorded):
        assert got == again == (7, 2, ["rank 0", "rank 1"])


class _SeenError(Exception):
    pass


def agrees(member, kind):
    """Our own collectives: on a device whose tensors are no CPU tensors."""
    device = Counting(kind, member)
    member.start()
    fake = device.fake
    fake.place = lambda: torch.device("meta")
    fake.handles = lambda where: where.type == "meta"

    def see():
        raise _SeenError

    fake.inside = see
    for act in (lambda: agreement.any_rank(True), lambda: agreement._gathered(torch.tensor([1]), dist.group.WORLD)):
        with pytest.raises(_SeenError):
            act()
    return device.meshes


def test_our_own_collectives_run_on_the_device(make_world):
    assert run(make_world, "fake", agrees) == [0, 0]
