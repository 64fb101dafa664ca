"""Steps that put other parameters, children or buffers in place of those that a snapshot was taken of."""

import pytest
import torch
import torch.distributed as dist
from snapshot_kit import given, in_child
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from deadpool_run.worker.snapshot.snapshot import Snapshots

pytestmark = pytest.mark.usefixtures("copied")

PUTS = pytest.mark.parametrize("put", [Snapshots.rewind, Snapshots.restore])


def filled(value, module=None):
    module = nn.Linear(2, 2) if module is None else module
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    return module


def exchange(module, value, name="weight"):
    setattr(module, name, nn.Parameter(torch.full_like(getattr(module, name), value)))
    return getattr(module, name)


def is_filled(tensor, value):
    return torch.equal(tensor, torch.full_like(tensor, value))


@PUTS
def test_the_parameter_of_the_snapshot_is_back_with_its_values(slots, put):
    net = filled(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    snapshots = slots.own(protect={"net": net, "optimizer": optimizer})
    before = net.weight
    snapshots.capture_now(3)
    exchange(net, 2)
    put(snapshots, 3)
    assert net.weight is before is optimizer.param_groups[0]["params"][0]
    assert is_filled(net.weight, 1)


@PUTS
def test_a_capture_follows(slots, put):
    net = filled(1)
    snapshots = slots.own(protect={"net": net})
    snapshots.capture_now(3)
    after = exchange(net, 2)
    snapshots.capture_now(4)
    exchange(net, 3)
    put(snapshots, 4)
    assert net.weight is after
    assert is_filled(net.weight, 2)
    snapshots.restore(3)
    assert is_filled(net.weight, 1)


def test_a_version_between_two_captures_is_followed(slots):
    net = filled(1)
    snapshots = slots.own(protect={"net": net}, interval=4)
    snapshots.capture_now(4)
    after = exchange(net, 2)
    snapshots.begin(5)
    exchange(net, 3)
    snapshots.rewind(5)
    assert net.weight is after
    exchange(net, 3)
    snapshots.restore(4)
    assert net.weight is after
    assert is_filled(after, 1)


@pytest.mark.parametrize("later", ["tied", "again"])
def test_shared_parameters_are_shared_again(slots, later):
    net = nn.Module()
    net.tied = net.again = nn.Parameter(torch.ones(2))
    snapshots = slots.own(protect={"net": net})
    snapshots.capture_now(3)
    exchange(net, 2, later)
    snapshots.restore(3)
    assert net.tied is net.again
    assert is_filled(net.again, 1)


def test_of_shared_parameters_the_second_is_captured_once_it_is_another(slots):
    net = nn.Module()
    net.tied = net.again = nn.Parameter(torch.ones(2))
    snapshots = slots.own(protect={"net": net})
    snapshots.capture_now(3)
    exchange(net, 2, "again")
    snapshots.capture_now(4)
    with torch.no_grad():
        net.again.fill_(3)
    snapshots.restore(4)
    assert is_filled(net.again, 2)
    assert is_filled(net.tied, 1)


@PUTS
def test_a_child_is_back(slots, put):
    net = nn.Sequential(filled(1), nn.BatchNorm1d(2))
    snapshots = slots.own(protect={"net": net})
    before = list(net)
    snapshots.capture_now(3)
    net[0], net[1] = filled(2), nn.BatchNorm1d(2)
    net[1].running_mean.fill_(5)
    put(snapshots, 3)
    assert list(net) == before
    assert is_filled(net[0].weight, 1)
    assert is_filled(net[1].running_mean, 0)


@PUTS
def test_an_added_parameter_is_gone_and_a_removed_one_is_back_in_order(slots, put):
    net = filled(1)
    snapshots = slots.own(protect={"net": net})
    snapshots.capture_now(3)
    net.more = nn.Parameter(torch.ones(2))
    del net.weight
    net.weight = torch.ones(2, 2)
    put(snapshots, 3)
    assert [name for name, _ in net.named_parameters()] == ["weight", "bias"]
    assert isinstance(net.weight, nn.Parameter)
    assert "weight" not in vars(net)
    assert is_filled(net.weight, 1)


def test_a_module_that_keeps_references_to_its_parameters_has_the_right_ones(slots):
    net = filled(1, nn.LSTM(2, 2))
    snapshots = slots.own(protect={"net": net})
    expected = net(torch.ones(1, 2))[0]
    snapshots.capture_now(3)
    exchange(net, 2, "weight_ih_l0")
    snapshots.restore(3)
    assert torch.equal(net(torch.ones(1, 2))[0], expected)


@PUTS
def test_a_buffer_is_back_and_a_tensor_that_was_in_its_place_is_left_alone(slots, put):
    net, constant = nn.BatchNorm1d(2), torch.full((2,), 7.0)
    snapshots = slots.own(protect={"net": net})
    before = net.running_mean
    snapshots.capture_now(3)
    net.running_mean = constant
    put(snapshots, 3)
    assert net.running_mean is before
    assert is_filled(before, 0)
    assert is_filled(constant, 7)


def test_the_groups_and_the_state_of_an_optimizer_are_back(slots):
    net = filled(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    snapshots = slots.own(protect={"net": net, "optimizer": optimizer})
    net(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    before, kept = net.weight, net.weight.detach().clone()
    momentum = optimizer.state[before]["momentum_buffer"].clone()
    snapshots.capture_now(3)
    after = exchange(net, 2)
    optimizer.param_groups[0]["params"][0] = after
    optimizer.state[after] = {"momentum_buffer": optimizer.state.pop(before)["momentum_buffer"] * 2}
    snapshots.restore(3)
    assert optimizer.param_groups[0]["params"][0] is net.weight is before
    assert torch.equal(net.weight, kept)
    assert list(optimizer.state) == [net.bias, before] or list(optimizer.state) == [before, net.bias]
    assert torch.equal(optimizer.state[before]["momentum_buffer"], momentum)


def test_a_variable_and_a_module_share_parameters_after_a_restore(slots):
    net = filled(1)
    snapshots = slots.own(protect={"net": net})
    weight, held = net.weight, []
    snapshots.find_variables()
    for version in (1, 2, 3):
        weight, held = exchange(net, version), [net.weight]
        snapshots.capture_now(version)
    weight, held = exchange(net, 9), [net.weight]
    snapshots.restore(2)
    assert is_filled(net.weight, 2)
    assert weight is net.weight
    assert held[0] is net.weight


def test_the_trial_sees_a_parameter_that_the_step_has_exchanged(slots):
    net = filled(1)
    snapshots = slots.own(protect={"net": net})
    snapshots.find_variables()
    snapshots.capture_now(3)
    seen = []
    for value in (2, 2, 3):
        exchange(net, value)
        seen.append(snapshots.observe())
        snapshots.restore(3)
    assert seen[0] == seen[1] != seen[2]


def sharded(gift):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))

    def placed(value):
        return nn.Parameter(distribute_tensor(torch.full((4, 2), value), mesh, [Shard(0)], src_data_rank=None))

    net = nn.Module()
    net.weight = placed(1.0)
    _, snapshots = given(gift, protect={"net": net})
    snapshots.capture_now(3)
    net.weight = after = placed(2.0)
    snapshots.capture_now(4)
    net.weight = placed(3.0)
    snapshots.restore(4)
    found = [net.weight is after, is_filled(net.weight.to_local(), 2)]
    net.weight = placed(4.0)
    snapshots.restore(3)
    found += [net.weight is after, is_filled(net.weight.to_local(), 1)]
    snapshots.close()
    dist.destroy_process_group()
    return found


def test_a_shard_that_fsdp_does_not_manage_is_followed(slots):
    assert in_child(sharded, slots.gift()) == [True] * 4


def resized(buffer, value):
    buffer.resize_(2, 3).fill_(value)


def of_another_dtype(buffer, value):
    buffer.data = torch.full((1,), value, dtype=torch.float64)


@PUTS
@pytest.mark.parametrize("change", [resized, of_another_dtype])
def test_a_buffer_whose_shape_changes_in_place(slots, put, change):
    """Observers of a quantization begin empty, and take the shape of what they see."""
    net = filled(1)
    net.register_buffer("seen", torch.full((4,), 1.0))
    snapshots = slots.own(protect={"net": net})
    buffer = net.seen
    snapshots.capture_now(3)
    change(buffer, 2.0)
    put(snapshots, 3)
    assert net.seen is buffer
    assert torch.equal(buffer, torch.full((4,), 1.0))
    change(buffer, 2.0)
    expected = buffer.clone()
    snapshots.capture_now(4)
    change(buffer, 3.0)
    put(snapshots, 4)
    assert net.seen is buffer
    assert torch.equal(buffer, expected)
    assert buffer.dtype == expected.dtype
