"""DTensors in variables: an average of sharded weights that a script keeps by hand."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from deadpool_run.errors import RefusedError
from deadpool_run.worker.compat.placements import parse_placements
from deadpool_run.worker.variables.values.kinds.distributed_tensors import parts_of
from deadpool_run.worker.variables.variables import Variables

SMALL, LARGE = 3, 200


class Box(list):
    """A list that snapshots do not keep, because its class has slots."""

    __slots__ = ()


@pytest.fixture
def mesh():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield Box([init_device_mesh("cpu", (2,))])
    dist.destroy_process_group()


@pytest.fixture
def mesh_of_two():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dist.destroy_process_group()


def sharded(mesh, size, placement=None):
    whole = torch.arange(float(size * size)).reshape(size, size)
    return distribute_tensor(whole, mesh[0], [placement or Shard(0)], src_data_rank=None)


def facts(tensor):
    return tensor.to_local().tolist(), tensor.placements, tensor.shape, tensor.stride()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("size", [SMALL, LARGE])
@pytest.mark.parametrize("in_setup", [True, False])
def test_an_average_of_sharded_weights_comes_back(mesh, size, placement, in_setup):
    def loop(taken, *, steps):
        weight = Box([sharded(mesh, size, placement)])
        average, variables = {"weight": weight[0].clone()} if in_setup else {}, Variables()
        first = Box(average.values())
        variables.begin(parts=[("weight", weight[0])], others=[weight[0]])
        if steps:
            average.setdefault("weight", weight[0].clone()).mul_(0.5)
        taken.append(variables.take())
        if not steps:
            variables.put(taken[0])
            assert not first or average["weight"] is first[0]
        return facts(average["weight"])

    taken = Box()
    assert loop(taken, steps=1) == loop(taken, steps=0)


def test_a_step_is_undone_in_place(mesh):
    weight, variables = sharded(mesh, SMALL), Variables()
    average, kept = weight.clone(), Box()
    kept.append(average)
    variables.begin(parts=[("weight", weight)], others=[weight])
    average.add_(1)
    taken, expected = variables.take(), facts(average)
    average.add_(1)
    variables.put(taken)
    assert average is kept[0]
    assert facts(average) == expected


@pytest.mark.parametrize("in_setup", [True, False])
def test_shards_of_two_mesh_dimensions_come_back(mesh_of_two, in_setup):
    def loop(taken, *, steps):
        weight = Box([DTensor.from_local(torch.ones(2, 3), mesh_of_two, placements, run_check=False)])
        average, variables = weight[0].clone() if in_setup else None, Variables()
        variables.begin(parts=[("weight", weight[0])], others=[weight[0]])
        if steps:
            average = weight[0] * 3
        taken.append(variables.take())
        if not steps:
            variables.put(taken[0])
        return facts(average)

    placements, taken = [*parse_placements(["_S(0, 2)", "S(0)"])], Box()
    assert loop(taken, steps=1) == loop(taken, steps=0)


def test_shards_in_an_order_that_placements_do_not_show_are_not_kept(mesh_of_two):
    tensor = DTensor.from_local(torch.ones(2, 3), mesh_of_two, [Shard(0), Shard(0)], run_check=False)
    assert parts_of(tensor) is not None
    (entry,) = tensor._spec.shard_order
    tensor._spec.shard_order = (entry._replace(mesh_dims=(1, 0)),)
    assert parts_of(tensor) is None


def test_views_of_one_shard_still_share_it(mesh):
    def loop(taken, *, steps):
        weight, average, view, variables = Box([sharded(mesh, SMALL)]), None, None, Variables()
        variables.begin(parts=[("weight", weight[0])], others=[weight[0]])
        if steps:
            average = weight[0].clone()
            view = average.detach()
        taken.append(variables.take())
        if not steps:
            variables.put(taken[0])
        view.mul_(2)
        return facts(average), facts(view)

    taken = Box()
    assert loop(taken, steps=1) == loop(taken, steps=0)


def test_the_weights_themselves_are_kept_by_others(mesh):
    weight, variables = sharded(mesh, LARGE), Variables()
    variables.begin(parts=[("weight", weight)], others=[weight])
    weight.add_(1)
    taken = variables.take()
    assert taken["large"] == []
    assert not variables.too_large


@pytest.mark.parametrize("what", ["partial", "of another mesh", "with gradients"])
def test_any_other_is_lost_and_refused_when_it_is_used(mesh, what):
    weight, held, variables = sharded(mesh, SMALL), None, Variables()
    variables.begin(parts=[("weight", weight)], others=[weight])
    taken = variables.take()
    if what == "partial":
        held = DTensor.from_local(torch.ones(3), mesh[0], [Partial()])
    elif what == "of another mesh":
        held = sharded([init_device_mesh("cpu", (2,), mesh_dim_names=("other",))], SMALL)
    else:
        held = weight.clone().requires_grad_()
    taken = variables.take()
    held = None if taken else held
    variables.put(taken)
    with pytest.raises(RefusedError, match="it is a DTensor"):
        held.sum()
