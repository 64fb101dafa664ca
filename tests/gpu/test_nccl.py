"""Deadpool groups on CUDA tensors. One GPU is enough for the first tests; losing a peer takes two."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from kit.world import TIMEOUT, World, warm_up
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.worker.groups.registry import GroupState
from deadpool_run.worker.groups.transcript import Transcript

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONG = timedelta(seconds=50)


@pytest.fixture
def make_world():
    warm_up()
    worlds = []

    def make(size):
        worlds.append(World(size))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


def device_of(member):
    device = torch.device("cuda", member.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def attached_twice(member):
    device = device_of(member)
    registry = member.registry
    registry.recording = Transcript()
    member.start()
    model = DistributedDataParallel(nn.Linear(8, 8).to(device), device_ids=[device.index])
    for epoch in (2, 3):
        registry.begin_step()
        loss = model(torch.ones(4, 8, device=device)).sum()
        loss.backward()
        flags = torch.tensor([member.rank, 7], device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        gathered = torch.empty(member.size * 2, device=device)
        dist.all_gather_into_tensor(gathered, torch.ones(2, device=device))
        every = [None] * member.size
        dist.all_gather_object(every, member.rank)
        torch.cuda.synchronize()
        assert flags.tolist() == [member.size - 1, 7]
        assert gathered.tolist() == [1.0] * len(gathered)
        assert every == list(range(member.size))
        assert not registry.step_failed
        registry.abort()
        assert registry.state is GroupState.DRAINING
        assert registry.step_failed
        dist.all_reduce(flags)
        torch.cuda.synchronize()
        assert flags.tolist() == [member.size - 1, 7]
        registry.attach(member.store, f"e{epoch}", TIMEOUT)
    registry.shut_down()
    return len(Transcript.from_bytes(registry.recording.to_bytes())._entries["0"]) > 0


def test_groups_on_cuda_are_attached_again_under_a_live_model(make_world):
    assert all(make_world(max(1, torch.cuda.device_count())).run(attached_twice))


def crossing(member):
    device = device_of(member)
    member.start()
    got = torch.empty(4, device=device)
    mine = torch.full((4,), float(member.rank), device=device)
    ops = [
        dist.P2POp(dist.isend, mine, (member.rank + 1) % member.size),
        dist.P2POp(dist.irecv, got, (member.rank - 1) % member.size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return got.tolist()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_crossing_sends_are_coalesced(make_world):
    assert make_world(2).run(crossing) == [[1.0] * 4, [0.0] * 4]


def loses_a_peer(member):
    device = device_of(member)
    member.start(timeout=LONG)
    x = torch.ones(1 << 20, device=device)
    dist.all_reduce(x)
    torch.cuda.synchronize()
    member.meet("ready")
    if member.rank == 1:
        threading.Event().wait(60)
    timer = threading.Timer(0.5, member.registry.abort)  # as the agent orders it
    timer.start()
    start = time.monotonic()
    member.registry.begin_step()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    timer.join()
    assert member.registry.step_failed
    return time.monotonic() - start


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_an_abort_frees_the_host_from_a_lost_peer(make_world):
    world = make_world(2)
    handles = world.start_all(loses_a_peer)
    world.store.wait(["met/ready"], TIMEOUT)
    handles[1].kill()
    assert handles[0].result() < 10
