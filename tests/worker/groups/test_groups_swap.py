"""A rank is killed inside a step; the others abort their steps, a replacement takes its place, and training ends bit-equal."""

import hashlib
import threading
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.worker.groups.registry import GroupState
from deadpool_run.worker.transcript.transcript import Transcript

STEPS = 6
KILL_AT = 3
WIDTH = 32
ATTACH = timedelta(seconds=20)


class AbandonedError(Exception):
    """Raised by the optimizer's hook, as StepAborted is."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.norm(x)


def build(mode, size):
    torch.manual_seed(0)
    model = Net()
    if mode == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=0.004)
    else:
        shape = (size,) if mode == "fsdp" else (2, size // 2)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def state(model, optimizer):
    tensors = [local(p.data) for p in model.parameters()] + [b.data for b in model.buffers()]
    for p in model.parameters():
        tensors += [local(v) for _, v in sorted(optimizer.state[p].items()) if torch.is_tensor(v)]
    return tensors


def digest(model, optimizer):
    hashed = hashlib.sha256()
    for tensor in state(model, optimizer):
        hashed.update(tensor.detach().contiguous().numpy().tobytes())
    return hashed.hexdigest()


def one_step(model, optimizer, index, rank):
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(100 * index + rank))
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def train(member, mode, kill):
    """A rank from the start; `kill` is (rank, victim waits here at KILL_AT) or None."""
    registry = member.registry
    registry.recording = Transcript()
    member.start()
    model, optimizer = build(mode, member.size)

    def hook(*_):
        if registry.step_failed:
            raise AbandonedError

    optimizer.register_step_pre_hook(hook)
    index, lost = 0, 0
    while index < STEPS:
        if index == KILL_AT and kill == member.rank:
            member.store.set("victim ready", "1")
            threading.Event().wait(60)  # never in the collective: the others hang until it is killed
        registry.begin_step()
        buffers = [b.clone() for b in model.buffers()]
        try:
            one_step(model, optimizer, index, member.rank)
        except AbandonedError:
            lost += 1
            optimizer.zero_grad()
            for buffer, kept in zip(model.buffers(), buffers, strict=True):
                buffer.data.copy_(kept)
            assert registry.state is GroupState.ABORTED
            if member.rank == (kill + 1) % member.size:
                tensors = [t.detach().clone() for t in state(model, optimizer)]
                member.store.set("state", encode(tensors))
            registry.attach(member.store, "e2", ATTACH)
            continue
        index += 1
        if index == 2:
            member.store.set(f"transcript{member.rank}", registry.recording.to_bytes())
            registry.recording = None
        if index == KILL_AT and kill is not None:
            member.store.set(f"state{member.rank}", encode([t.detach() for t in state(model, optimizer)]))
    return digest(model, optimizer), lost, member.failures


def encode(tensors):
    recording = Transcript()
    wide = [t.contiguous().view(-1).view(torch.uint8) for t in tensors]
    recording.fill(recording.reserve("state", "state", wide), wide)
    return recording.to_bytes()


def decode(data, tensors):
    played = Transcript.from_bytes(data)
    wide = [torch.empty(t.numel() * t.element_size(), dtype=torch.uint8) for t in tensors]
    assert played.play("state", "state", wide) is not None
    for tensor, raw in zip(tensors, wide, strict=True):
        tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))


def replacement(member, mode):
    registry = member.registry
    registry.playback = Transcript.from_bytes(member.store.get(f"transcript{member.rank}"))
    member.start(attached=False)
    model, optimizer = build(mode, member.size)
    for index in (0, 1):
        one_step(model, optimizer, index, member.rank)
    assert registry.playback.misses == 0
    registry.playback = None
    with torch.no_grad():
        decode(member.store.get(f"state{member.rank}"), state(model, optimizer))
    registry.attach(member.store, "e2", ATTACH)
    for index in range(KILL_AT, STEPS):
        one_step(model, optimizer, index, member.rank)
    return digest(model, optimizer)


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp"])
def test_killed_rank_is_replaced_bit_equal(make_world, mode):
    expected = [result[0] for result in make_world(4).run(train, mode, None)]
    world = make_world(4)
    victim = 1
    handles = world.start_all(train, mode, victim)
    world.store.wait(["victim ready"], ATTACH)
    handles[victim].kill()
    promoted = world.start(victim, replacement, mode)
    results = [promoted if rank == victim else handles[rank] for rank in range(4)]
    results = [handle.result() for handle in results]
    assert [r if isinstance(r, str) else r[0] for r in results] == expected
    survivors = [r for rank, r in enumerate(results) if rank != victim]
    assert all(lost == 1 and len(failures) == 1 for _, lost, failures in survivors), survivors


def set_up(member, mode, of_setup):
    """A rank's set-up and one step. Returns the bytes of its transcript, as if nothing were protected."""
    member.registry.recording = Transcript(of_setup=of_setup)
    member.start()
    model, optimizer = build(mode, member.size)
    one_step(model, optimizer, 0, member.rank)
    assert member.registry.recording.end_setup([]) == []
    return member.registry.recording.nbytes


@pytest.mark.parametrize("mode", ["ddp", "fsdp", "hsdp"])
def test_what_torch_sends_for_its_models_does_not_fill_a_transcript(make_world, mode):
    """Torch's broadcasts of parameters, gathers of shards and reductions of gradients."""
    assert make_world(4).run(set_up, mode, True) == make_world(4).run(set_up, mode, False)
