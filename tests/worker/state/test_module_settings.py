"""Settings of FSDP2 and DDP that a script changes in its loop, in the state of a module."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from deadpool_run.errors import SnapshotError
from deadpool_run.worker.codec import copied
from deadpool_run.worker.snapshot.snapshot import Snapshots
from deadpool_run.worker.state.modules import ModuleState

CHANGES = {
    "gradient_divide_factor": lambda model: model.set_gradient_divide_factor(2.0),
    "reduce_grads": lambda model: model.set_requires_gradient_sync(False),
    "all_reduce_grads": lambda model: model.set_requires_all_reduce(False),
    "reshard after forward": lambda model: model.set_reshard_after_forward(False),
    "reshard_after_backward": lambda model: model.set_reshard_after_backward(False),
    "unshard_in_backward": lambda model: model[0].set_unshard_in_backward(False),
    "force_sum_reduction_for_comms": lambda model: model.set_force_sum_reduction_for_comms(True),
    "reduce_scatter_unused_params": lambda model: model.set_reduce_scatter_unused_params(True),
    "unshard_async_op": lambda model: model._set_unshard_async_op(True),
    "is_last_backward": lambda model: model.set_is_last_backward(False),
    "prefetch in forward": lambda model: model[0].set_modules_to_forward_prefetch([model[1]]),
    "prefetch in backward": lambda model: model[1].set_modules_to_backward_prefetch([model[0]]),
}
KEPT = {
    "set_gradient_divide_factor",
    "set_reduce_scatter_divide_factor",
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_forward",
    "set_reshard_after_backward",
    "set_unshard_in_backward",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_is_last_backward",
    "set_manual_backward_finalization",
    "set_modules_to_forward_prefetch",
    "set_modules_to_backward_prefetch",
    "set_custom_all_gather",
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_separate_reduce_scatter_group",
    "set_allocate_memory_from_process_group_for_comm",
    "set_symm_mem_for_comm",
}
LEFT = {
    "set_keep_unsharded_storage": "how memory is used",
    "set_post_optim_event": "an event of one step",
    "set_reduce_scatter_max_input_buffers": "without effect after the first forward",
}
CHANGE = pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)


@pytest.fixture(autouse=True)
def _group():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


def sharded(**options):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    mesh = init_device_mesh("cpu", (4,))
    for child in model[:2]:
        fully_shard(child, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def begun(model, *, trained=True):
    state = ModuleState("model", model, ())
    state.begin()
    if trained:
        model(torch.ones(2, 4)).sum().backward()
        state.reshard()
    return state


def read(model):
    """Each setting by torch's own names."""
    states = [module._get_fsdp_state() for module in (model, model[0], model[1])]
    number = {id(state): index for index, state in enumerate(states)}
    return [
        [
            state._state_ctx.is_last_backward,
            [number[id(each)] for each in state._states_to_forward_prefetch],
            [number[id(each)] for each in state._states_to_backward_prefetch],
            [
                (
                    {key: value for key, value in vars(group).items() if type(value) is bool and key[0] != "_"},
                    group.gradient_divide_factor,
                    group.post_forward_mesh_info is group.mesh_info,
                    group.post_forward_mesh_info and group.post_forward_mesh_info.shard_mesh_size,
                )
                for group in state._fsdp_param_groups
            ],
        ]
        for state in states
    ]


def written(values):
    """The values as a replacement reads them."""
    return json.loads(json.dumps(values))


@CHANGE
def test_a_survivor_gets_the_setting_of_its_snapshot(change):
    model = sharded()
    state = begun(model)
    before, then = copied(state.take()), read(model)
    change(model)
    assert read(model) != then
    state.put(before)
    assert read(model) == then


@CHANGE
def test_a_replacement_gets_a_setting_that_the_loop_has_changed(change):
    lost, model = sharded(), sharded()
    losing, state = begun(lost), begun(model)
    change(lost)
    assert read(model) != read(lost)
    state.put(written(losing.take()))
    assert read(model) == read(lost)


@CHANGE
def test_a_setting_that_the_loop_has_changed_back_is_as_it_began(change):
    model, other = sharded(), sharded()
    state = begun(model)
    change(other)
    beginning = begun(other)
    then = read(other)
    other.set_gradient_divide_factor(3.0)
    beginning.put(written(state.take()))
    assert read(other) == then


def test_nothing_is_written_unless_a_setting_has_changed():
    assert begun(nn.Linear(2, 2), trained=False).take()["sharding"] == {}
    model = sharded()
    state = begun(model)
    assert state.take()["sharding"] == {}
    model[1].set_gradient_divide_factor(2.0)
    assert state.take()["sharding"] == {"1:0": {"gradient_divide_factor": 2.0}}


def test_the_snapshot_before_the_first_forward_leaves_the_root_to_torch():
    model, late = sharded(), sharded()
    state, later = begun(model, trained=False), begun(late, trained=False)
    first = copied(state.take())
    model(torch.ones(2, 4)).sum().backward()
    state.reshard()
    state.put(first)
    later.put(written(first))
    late(torch.ones(2, 4)).sum().backward()
    assert read(model) == read(late)


def test_an_earlier_checkpoint_has_no_settings():
    model = sharded()
    state = begun(model)
    old, then = state.take(), read(model)
    del old["sharding"], old["reduces"]
    state.put(old)
    assert read(model) == then


def test_a_number_of_ranks_to_reshard_to_comes_back():
    model, other = sharded(reshard_after_forward=2), sharded(reshard_after_forward=2)
    state, replacement = begun(model), begun(other)
    before, then = copied(state.take()), read(model)
    model.set_reshard_after_forward(True)
    changed = written(state.take())
    assert changed["sharding"]["0:0"] == {"post_forward_mesh_info": True}
    replacement.put(changed)
    assert read(other) == read(model) != then
    for each, module in ((state, model), (replacement, other)):
        each.put(before)
        assert read(module) == then


def test_a_hook_of_the_loop_is_put_back_or_refused():
    def scale(output):
        output.mul_(2)

    model, other = sharded(), sharded()
    state, replacement = begun(model), begun(other)
    model[0].set_all_reduce_hook(scale)
    after = written(state.take())
    model[0].set_all_reduce_hook(print)
    state.put(after)
    assert model[0]._get_fsdp_state()._fsdp_param_groups[0]._all_reduce_hook is scale
    assert state.obstacles(after) == []
    (why,) = replacement.obstacles(after)
    assert "_all_reduce_hook" in why
    assert "scale" in why
    other[0].set_all_reduce_hook(scale)  # in a rehearsed step
    assert replacement.obstacles(after) == []
    replacement.put(after)
    assert other[0]._get_fsdp_state()._fsdp_param_groups[0]._all_reduce_hook is scale


@pytest.mark.parametrize("put", [Snapshots.rewind, Snapshots.restore])
def test_a_snapshot_has_the_settings(slots, put):
    model = sharded()
    snapshots = slots.own(protect={"model": model})
    snapshots.find_variables()
    model.set_gradient_divide_factor(2.0)
    model[0].set_modules_to_forward_prefetch([model[1]])
    then = read(model)
    snapshots.capture_now(3)
    model.set_gradient_divide_factor(4.0)
    model.set_reshard_after_backward(False)
    put(snapshots, 3)
    assert read(model) == then


def test_a_restore_is_refused_before_it_changes_anything(slots):
    model, other = sharded(), sharded()
    snapshots, replacement = slots.own(protect={"model": model}), slots.own(protect={"model": other})
    model[0].set_all_reduce_hook(nn.init.zeros_)
    snapshots.capture_now(3)
    before = other[0].weight.to_local().clone()
    with pytest.raises(SnapshotError, match="_all_reduce_hook of '0' to 'zeros_'"):
        replacement.restore(3)
    assert torch.equal(other[0].weight.to_local(), before)


def test_settings_of_another_sharding_are_refused():
    model = sharded()
    state = begun(model)
    model[1].set_gradient_divide_factor(2.0)
    after = written(state.take())
    (why,) = begun(nn.Linear(4, 4), trained=False).obstacles(after)
    assert "'1'" in why


def test_a_factor_may_be_any_number():
    model = sharded()
    state = begun(model)
    model.set_gradient_divide_factor(torch.tensor(2.0))
    assert state.take()["sharding"] == {":0": {"gradient_divide_factor": 2.0}}


def test_every_setting_is_known_to_this_torch():
    """A setter of a later torch needs a decision whether snapshots keep its setting."""
    setters = {name for name in dir(type(sharded())) if name.startswith("set_")} - {"set_extra_state", "set_submodule"}
    assert setters <= KEPT | LEFT.keys()


def test_whether_ddp_reduces_in_the_next_backward_is_kept():
    lost, model = DistributedDataParallel(nn.Linear(2, 2)), DistributedDataParallel(nn.Linear(2, 2))
    losing, state = begun(lost, trained=False), begun(model, trained=False)
    before = copied(state.take())
    lost.require_backward_grad_sync = False
    state.put(written(losing.take()))
    assert not model.require_backward_grad_sync
    state.put(before)
    assert model.require_backward_grad_sync
