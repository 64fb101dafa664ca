"""Snapshots of DDP and FSDP2 models: two real ranks on Gloo, restored by two others."""

import itertools

import pytest
import torch
import torch.distributed as dist
from snapshot_kit import Child, digest, draws, given, seed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.errors import SnapshotError
from deadpool_run.vault.segments import read_manifest

RANKS = 2
STEPS = 3
SHARDED = ("model/0.weight", "model/0.bias", "optimizer/model/0.weight/exp_avg", "optimizer/model/0.weight/step")


@pytest.fixture
def slots(make_slots):
    return make_slots(RANKS)


def _net(number):
    seed(number)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.Linear(7, 7), nn.Linear(7, 2))


def _ddp(number, _shape):
    return DistributedDataParallel(_net(number))


def _fsdp(number, shape):
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = _net(number)
    fully_shard(model[3], mesh=mesh)
    return fully_shard(model, mesh=mesh)


MODELS = {"ddp": (_ddp, (2,)), "fsdp": (_fsdp, (2,)), "hsdp": (_fsdp, (2, 1))}


class Training:
    def __init__(self, kind, number, rank):
        make, shape = MODELS[kind]
        self.model = make(number, shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        seed(number + rank)

    def protected_by(self, snapshots):
        snapshots.protect("model", self.model)
        snapshots.protect("optimizer", self.optimizer)
        self.names = {id(p): name for name, p in snapshots.protected.parameters().items()}
        return snapshots

    def step(self, snapshots=None):
        self.model(torch.randn(4, 5)).square().mean().backward()
        if snapshots is not None:
            snapshots.wait()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self):
        """Leaves FSDP2's root gathered."""
        self.model.eval()
        with torch.no_grad():
            answer = digest(self.model(torch.ones(3, 5)))
        self.model.train()
        return answer

    def digest(self):
        shards = [_local(p) for group in self.optimizer.param_groups for p in group["params"]]
        state = [{k: _local(v) for k, v in values.items()} for values in self.optimizer.state.values()]
        return digest(shards, state, list(self.model.buffers()))


def _local(value):
    return value.to_local().detach() if isinstance(value, DTensor) else value


def _join(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}", rank=rank, world_size=RANKS)


def captures(gift, rank, folder, kind):
    _join(rank, folder)
    training = Training(kind, 1, rank)
    _, snapshots = given(gift)
    training.protected_by(snapshots)
    snapshots.capture_now(0)
    for version in range(1, STEPS + 1):
        training.step(snapshots)
        snapshots.begin(version)
        then = training.digest()
        answer = training.evaluate()
        snapshots.wait()
        dist.barrier()  # the next one finds a slot that is free, however late the other rank is
    held = snapshots.held()
    training.step(snapshots)
    later = training.digest(), draws()
    snapshots.close()
    return held, answer, then, later


def restores(gift, rank, folder, kind, rehearsal):
    _join(rank, folder)
    training = Training(kind, 2, rank)
    for _ in range(rehearsal):
        training.step()
    training.evaluate()
    status_page, snapshots = given(gift)
    training.protected_by(snapshots)
    snapshots.restore(status_page.committed())
    then = training.digest()
    answer = training.evaluate()
    training.step(snapshots)
    later = training.digest(), draws()
    snapshots.close()
    return answer, then, later


def _on_both(slots, folder, target, *args):
    children = [Child(target, slots.gift(rank), rank, str(folder), *args) for rank in range(RANKS)]
    return [child.result() for child in children]


@pytest.mark.parametrize(("kind", "rehearsal"), [("ddp", 2), ("fsdp", 0), ("fsdp", 2), ("hsdp", 0)])
def test_two_others_go_on_bit_for_bit(slots, tmp_path, kind, rehearsal):
    wanted = _on_both(slots, tmp_path / "one", captures, kind)
    assert {held[-1] for held, *_ in wanted} == {STEPS}
    found = _on_both(slots, tmp_path / "two", restores, kind, rehearsal)
    assert found == [tuple(want) for _, *want in wanted]


def _restored(gift, rank, folder, kind):
    """Return a training that is back at version 1, its snapshots, and the digest of version 2."""
    _join(rank, folder)
    training = Training(kind, 1, rank)
    _, snapshots = given(gift)
    training.protected_by(snapshots)
    training.step()
    snapshots.capture_now(1)
    training.step(snapshots)
    wanted = training.digest()
    snapshots.restore(1)
    return training, snapshots, wanted


def _repairs(gift, rank, folder, kind):
    """Between steps, after an evaluation, one rank keeps its weights and the other one is restored."""
    training, snapshots, wanted = _restored(gift, rank, folder, kind)
    training.evaluate()
    (snapshots.rewind, snapshots.restore)[rank](1)
    training.step(snapshots)
    snapshots.close()
    return wanted == training.digest()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_rewinds_and_one_that_restores_go_on_together(slots, tmp_path, kind):
    assert _on_both(slots, tmp_path / "one", _repairs, kind) == [True, True]


def test_the_manifest_names_the_place_of_a_shard(slots, tmp_path):
    _on_both(slots, tmp_path / "one", captures, "fsdp")
    for rank, name in itertools.product(range(RANKS), SHARDED):
        fd = slots.fds[rank][slots.status_page.rank_entries[rank].slots.index(STEPS)]
        entry = {entry.name: entry for entry in read_manifest(fd, STEPS).tensors}[name]
        if name.endswith("step"):
            assert entry.placement is None
            continue
        assert entry.placement.mesh == (RANKS,)
        assert entry.placement.names == ("shard",)
        assert entry.placement.at == (rank,)
        assert entry.placement.placements == ("S(0)",)
        assert entry.placement.shape[0] == 7
        assert entry.shape[0] == (4, 3)[rank]


def _exchanges(gift, rank, folder):
    """Restore rank 1's snapshot into rank 0's objects, and rank 0's into a replicated model."""
    _join(rank, folder)
    training = Training("fsdp", 1, rank)
    _, snapshots = given(gift)
    training.protected_by(snapshots)
    with pytest.raises(SnapshotError) as refused:
        snapshots.restore(STEPS)
    snapshots.close()
    return str(refused.value)


def test_a_shard_of_another_place_is_refused(slots, tmp_path):
    _on_both(slots, tmp_path / "one", captures, "fsdp")
    children = [Child(_exchanges, slots.gift(1 - rank), rank, str(tmp_path / "two")) for rank in range(RANKS)]
    for child in children:
        said = child.result()
        assert "model/3.weight: has shape" in said
        assert "model/3.weight: has the placement Placement(mesh=(2,)" in said


def _keeps_values(gift, rank, folder):
    """A DTensor in the state_dict of a user's object, and one that an optimizer made with a placement of its own."""
    _join(rank, folder)
    mesh = init_device_mesh("cpu", (RANKS,))

    class Average:
        def __init__(self):
            self.state = {"mean": distribute_tensor(torch.arange(6.0), mesh)}

        def state_dict(self):
            return dict(self.state)

        def load_state_dict(self, state):
            self.state = state

    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model.weight]["row"] = distribute_tensor(torch.arange(4.0), mesh, [Replicate()])
    average = Average()
    _, snapshots = given(gift)
    for name, obj in {"model": model, "optimizer": optimizer, "average": average}.items():
        snapshots.protect(name, obj)
    snapshots.capture_now(0)
    optimizer.state.clear()
    average.state["mean"] = average.state["mean"] * 0
    snapshots.restore(0)
    row = optimizer.state[model.weight]["row"]
    assert isinstance(row, DTensor)
    assert row.placements == (Replicate(),)
    assert row.to_local().tolist() == [0, 1, 2, 3]
    assert average.state["mean"].full_tensor().tolist() == [0, 1, 2, 3, 4, 5]
    snapshots.close()


def test_shards_in_values_and_odd_optimizer_state_come_back(slots, tmp_path):
    _on_both(slots, tmp_path / "one", _keeps_values)
