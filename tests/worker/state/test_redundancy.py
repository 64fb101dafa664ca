"""Which ranks hold the same, as DTensor and DDP say it. No communication is needed for that: groups have no peers here."""

import pytest
import torch
import torch.distributed as dist
from snapshot_kit import Child
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from deadpool_run.worker.state.protected import Protected
from deadpool_run.worker.state.redundancy import replica_leader

RANKS = 4


def _mesh(*shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("outer", "inner")[-len(shape) :])


def _net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))


def _tensor_parallel():
    """Most bytes are sharded within a node; a bias is everywhere."""
    model = nn.Linear(8, 8)
    mesh = _mesh(2, 2)
    model.weight = nn.Parameter(
        distribute_tensor(model.weight.detach(), mesh, [Replicate(), Shard(0)], src_data_rank=None)
    )
    model.bias = nn.Parameter(
        distribute_tensor(model.bias.detach(), mesh, [Replicate(), Replicate()], src_data_rank=None)
    )
    return model


def _pipelines():
    """Two stages; each stage's replicas are in a group of their own."""
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return DistributedDataParallel(_net(), process_group=stages[dist.get_rank() % 2])


MODELS = {
    "plain": (_net, [None] * 4),
    "ddp": (lambda: DistributedDataParallel(_net()), [0] * 4),
    "part of it ddp": (lambda: nn.Sequential(DistributedDataParallel(nn.Linear(1, 1)), nn.Linear(9, 9)), [None] * 4),
    "fsdp": (lambda: fully_shard(_net(), mesh=_mesh(4)), [None] * 4),
    "hsdp": (lambda: fully_shard(_net(), mesh=_mesh(2, 2)), [0, 1, 0, 1]),
    "tp": (_tensor_parallel, [0, 1, 0, 1]),
    "pp": (_pipelines, [0, 1, 0, 1]),
}


def told(kind, rank):
    dist.init_process_group("fake", rank=rank, world_size=RANKS)
    protected = Protected()
    protected.add("model", MODELS[kind][0]())
    return replica_leader(protected.modules.values())


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("kind", MODELS)
def test_the_lowest_rank_of_those_that_hold_the_same_is_named(kind):
    children = [Child(told, kind, rank) for rank in range(RANKS)]
    assert [child.result() for child in children] == MODELS[kind][1]


def test_who_protects_no_model_is_like_nobody():
    assert replica_leader(()) is None
