"""`protect()` refuses objects that no snapshot could hold or no replacement would have, and names the remedy."""

import threading
from collections import deque

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from deadpool_run.errors import ScriptError, SnapshotError


@pytest.fixture
def snapshots(slots):
    return slots.own()


class Holder:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Extra(nn.Linear):
    def get_extra_state(self):
        return (each for each in ())

    def set_extra_state(self, state):
        pass


class Counting(torch.optim.SGD):
    def state_dict(self):
        return {**super().state_dict(), "calls": 3}


class Around(torch.optim.Optimizer):
    def __init__(self, *inner):
        self.inner = dict(enumerate(inner))
        vars(self).update({f"inner{number}": each for number, each in enumerate(inner)})

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def sharded():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        return FullyShardedDataParallel(nn.Linear(1, 1), device_id=torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def with_buffer(buffer):
    model = nn.Linear(1, 1)
    model.register_buffer("extra", buffer)
    return model


def on_lambda():
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    optimizer.param_groups[0]["schedule"] = lambda step: step
    return optimizer


REFUSED = {
    "meta": (lambda: nn.Linear(2, 2, device="meta"), r"thing/weight is on the meta device.*\nAllocate it"),
    "lazy": (lambda: nn.LazyLinear(3), r"thing/weight is not initialized.*\nRun a forward before protect"),
    "sparse": (lambda: with_buffer(torch.eye(3).to_sparse()), r"thing/extra is a .*sparse.*\nOnly dense tensors"),
    "quantized": (
        lambda: with_buffer(torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)),
        r"thing/extra .*\nOnly dense tensors",
    ),
    "extra state": (lambda: Extra(1, 1), r"'thing'\. is a builtins\.generator.*\nLet state_dict"),
    "a meta parameter": (
        lambda: torch.optim.SGD(nn.Linear(1, 1, device="meta").parameters()),
        r"thing/0\.0 is on the meta device",
    ),
    "a function in a group": (on_lambda, r"'thing'.*schedule is a builtins\.function"),
    "more in a state_dict": (
        lambda: Counting([torch.ones(2, requires_grad=True)], lr=0.1),
        r"the state_dict\(\) of 'thing', a Counting, holds 'calls'.*\nMove it to",
    ),
    "a wrapper of two": (
        lambda: Around(*(torch.optim.SGD(nn.Linear(1, 1).parameters()) for _ in range(2))),
        r"thing=Around is a wrapper around 2 optimizers, not one\.\nProtect each optimizer inside it",
    ),
    "a wrapper of none": (Around, r"thing=Around has not called Optimizer\.__init__\(\).*\nCall super\(\)"),
    "FSDP1": (sharded, r"thing has a FullyShardedDataParallel \(FSDP1\).*\nShard the model with .*fully_shard"),
    "a python generator": (lambda: Holder({"next": (each for each in ())}), r"'thing'\.next is a builtins\.generator"),
    "an open file": (lambda: Holder([open("/dev/null")]), r"'thing'\[0\] is a _io\.TextIOWrapper"),  # noqa: SIM115, PTH123
    "a lambda": (lambda: Holder({"f": lambda: 0}), r"'thing'\.f is a builtins\.function"),
    "a sparse value": (lambda: Holder({"m": torch.eye(2).to_sparse()}), r"the state of 'thing' is a .*\nOnly dense"),
}


@pytest.mark.filterwarnings("ignore")  # of torch: lazy and quantized things
@pytest.mark.parametrize("what", REFUSED)
def test_what_no_snapshot_could_hold_is_refused_at_once(snapshots, what):
    make, says = REFUSED[what]
    thing = make()
    with pytest.raises(ScriptError, match=f"(?s)protect.*{says}"):
        snapshots.protect("thing", thing)
    if isinstance(thing, Holder) and isinstance(thing.state, list):
        thing.state[0].close()


def test_an_optimizer_may_have_more_in_its_state_dict_if_that_is_a_plain_attribute(snapshots):
    optimizer = Counting([torch.ones(2, requires_grad=True)], lr=0.1)
    optimizer.calls = 3
    snapshots.protect("thing", optimizer)
    optimizer.calls = 2  # what state_dict() returns is another value
    with pytest.raises(ScriptError, match="holds 'calls'"):
        snapshots.protect("other", optimizer)


def test_a_generator_can_be_protected(snapshots):
    generator = torch.Generator().manual_seed(5)
    snapshots.protect("noise", generator)
    snapshots.capture_now(0)
    want = torch.rand(3, generator=generator)
    snapshots.restore(0)
    assert torch.equal(torch.rand(3, generator=generator), want)


def trained(snapshots, model):
    snapshots.protect("model", model)
    for version in range(3):
        snapshots.capture_now(version)


def added(model):
    model.new = nn.Linear(1, 1)


def removed(model):
    del model[1]


def reshaped(model):
    model[1].weight = nn.Parameter(torch.zeros(5, 2))


def widened(model):
    model[1].to(torch.float64)


CHANGES = {
    added: r"the parameter 'new\.weight' was added to 'model' during training",
    removed: r"the parameter '1\.weight' was removed from 'model'",
    reshaped: r"the parameter '1\.weight' changed from \(2, 2\) of torch\.float32 to \(5, 2\) of torch\.float32",
    widened: r"the parameter '1\.weight' changed from \(2, 2\) of torch\.float32 to \(2, 2\) of torch\.float64",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_no_replacement_would_make_is_refused_when_it_changes(snapshots, change):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trained(snapshots, model)
    change(model)
    with pytest.raises(ScriptError, match=f"(?s){CHANGES[change]}.*\nCreate every parameter and buffer in set-up"):
        snapshots.begin(3)


def test_a_parameter_that_belongs_to_no_module_is_refused_when_it_comes_late(snapshots):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    snapshots.protect("optimizer", optimizer)
    trained(snapshots, model)
    optimizer.add_param_group({"params": [torch.ones(2, requires_grad=True)]})
    with pytest.raises(ScriptError, match="belongs to no protected module"):
        snapshots.begin(3)


def test_what_the_first_steps_make_is_no_change(snapshots):
    """A replacement runs them too."""
    model = nn.Sequential(nn.Linear(2, 2))
    snapshots.protect("model", model)
    snapshots.capture_now(0)
    model.append(nn.Linear(2, 2))
    snapshots.capture_now(1)
    snapshots.capture_now(2)
    want = model[1].weight.clone()
    with torch.no_grad():
        model[1].weight.zero_()
    snapshots.restore(2)
    assert torch.equal(model[1].weight, want)


def test_a_parameter_that_is_replaced_is_captured(snapshots):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    trained(snapshots, model)
    model[0] = nn.Linear(2, 2)
    model[1].weight = nn.Parameter(torch.full((2, 2), 7.0))
    want = model[0].weight.clone()
    snapshots.capture_now(3)
    with torch.no_grad():
        model[0].weight.zero_()
        model[1].weight.zero_()
    snapshots.restore(3)
    assert torch.equal(model[0].weight, want)
    assert torch.equal(model[1].weight, torch.full((2, 2), 7.0))


def test_buffers_may_come_go_and_grow(snapshots):
    model = with_buffer(torch.ones(2))
    model.register_buffer("lazy", None)
    model.register_buffer("going", torch.ones(1))
    trained(snapshots, model)
    model.lazy, model.extra, model.going = torch.full((3,), 5.0), torch.zeros(4), None
    snapshots.capture_now(3)
    model.lazy, model.extra, model.going = None, torch.ones(1), torch.ones(1)
    snapshots.restore(3)
    assert torch.equal(model.lazy, torch.full((3,), 5.0))
    assert torch.equal(model.extra, torch.zeros(4))
    assert model.going is None
    snapshots.restore(2)
    assert model.lazy is None
    assert torch.equal(model.going, torch.ones(1))
    assert torch.equal(model.extra, torch.ones(2))


def test_groups_that_came_later_come_and_go_with_the_version(snapshots):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].requires_grad_(requires_grad=False)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    snapshots.protect("optimizer", optimizer)
    trained(snapshots, model)
    model[1].requires_grad_(requires_grad=True)
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.3})
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    snapshots.capture_now(3)
    momentum = optimizer.state[model[1].weight]["momentum_buffer"].clone()
    snapshots.restore(2)
    assert len(optimizer.param_groups) == 1
    assert model[1].weight not in optimizer.state
    assert not model[1].weight.requires_grad
    snapshots.restore(3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.3]
    assert torch.equal(optimizer.state[model[1].weight]["momentum_buffer"], momentum)
    assert model[1].weight.requires_grad


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.LBFGS])
def test_parameters_in_another_order_get_that_of_the_snapshot(snapshots, kind):
    """A set orders parameters by their addresses, which differ in each process."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = kind(model.parameters(), lr=0.1)
    snapshots.protect("model", model)
    snapshots.protect("optimizer", optimizer)

    def step():
        def loss():
            optimizer.zero_grad()
            (value := (model(torch.ones(2)) * torch.tensor([1.0, 3.0])).pow(2).sum()).backward()
            return value

        optimizer.step(loss)

    step()
    snapshots.capture_now(2)
    step()
    expected = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.param_groups[0]["params"].reverse()
    snapshots.restore(2)
    assert optimizer.param_groups[0]["params"] == list(model.parameters())
    step()
    assert all(map(torch.equal, model.parameters(), expected))


def test_parameters_in_a_tuple_are_brought_into_order_too(snapshots):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots.protect("optimizer", optimizer)
    trained(snapshots, model)
    optimizer.param_groups[0]["params"] = tuple(reversed(list(model.parameters())))
    snapshots.restore(2)
    assert list(optimizer.param_groups[0]["params"]) == list(model.parameters())


def test_groups_of_other_parameters_are_refused(snapshots):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    snapshots.protect("optimizer", optimizer)
    trained(snapshots, model)
    optimizer.param_groups[0]["params"] = list(model[1].parameters())
    snapshots.capture_now(3)
    with pytest.raises(SnapshotError, match="1 groups here and 1 in the snapshot, of different parameters"):
        snapshots.restore(2)


def test_a_module_that_nobody_trains_is_not_trusted_to_be_untouched(snapshots):
    model, average = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots.protect("model", model)
    snapshots.protect("optimizer", optimizer)
    snapshots.begin(0)
    assert snapshots.is_untouched()
    with torch.no_grad():
        model.weight.add_(1)
    assert not snapshots.is_untouched()
    snapshots.begin(1)
    assert snapshots.is_untouched()
    snapshots.protect("average", average)
    snapshots.begin(2)
    assert not snapshots.is_untouched()


def exchange_data(model, optimizer):
    model.weight.data = model.weight.data * 2


def write_a_row(model, optimizer):
    model.weight.data[700, 3:9] = 0


def clear_the_state(model, optimizer):
    optimizer.state.clear()


def write_to_the_state(model, optimizer):
    optimizer.state[model.weight]["momentum_buffer"][5].zero_()


def count_in_the_state(model, optimizer):
    optimizer.state[model.weight]["count"] += 1


def append_to_the_state(model, optimizer):
    optimizer.state[model.weight]["history"].append(1)


def negate_a_zero(model, optimizer):
    optimizer.state[model.weight]["zero"] = -0.0


def write_inside_the_state(model, optimizer):
    optimizer.state[model.weight]["moments"][0].add_(1)


class Projector:
    """An object in an optimizer's state, as GaLore has: no value of torch's loader."""

    def __init__(self, rank):
        self.rank, self.basis, self.last, self.inner = rank, torch.eye(rank), deque([rank], 2), {"n": 0}


def count_in_an_object(model, optimizer):
    optimizer.state[model.weight]["projector"].inner["n"] += 1


def write_in_an_object(model, optimizer):
    optimizer.state[model.weight]["projector"].basis.mul_(2)


def append_to_a_deque(model, optimizer):
    optimizer.state[model.weight]["projector"].last.append(3)


def exchange_an_object(model, optimizer):
    optimizer.state[model.weight]["projector"] = Projector(3)


@pytest.mark.parametrize(
    "change",
    [
        count_in_an_object,
        write_in_an_object,
        append_to_a_deque,
        exchange_an_object,
        exchange_data,
        write_a_row,
        clear_the_state,
        write_to_the_state,
        count_in_the_state,
        append_to_the_state,
        negate_a_zero,
        write_inside_the_state,
    ],
)
def test_what_is_changed_after_an_interrupted_step_is_seen(snapshots, change):
    model = nn.Linear(1024, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    snapshots.protect("model", model)
    snapshots.protect("optimizer", optimizer)
    model(torch.ones(1024)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight].update(count=0, history=[0], zero=0.0, moments=[torch.zeros(2)], kind=torch.float32)
    optimizer.state[model.weight]["projector"] = Projector(2)
    snapshots.begin(1)
    assert snapshots.is_untouched()
    change(model, optimizer)
    assert not snapshots.is_untouched()


def test_an_object_in_the_state_of_an_optimizer_comes_back(snapshots):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots.protect("model", model)
    snapshots.protect("optimizer", optimizer)
    projector = optimizer.state[model.weight]["projector"] = Projector(2)
    snapshots.capture_now(1)
    for change in (count_in_an_object, write_in_an_object, append_to_a_deque):
        change(model, optimizer)
    projector.extra = 1
    optimizer.state[model.bias]["projector"] = Projector(3)
    snapshots.restore(1)
    found = optimizer.state[model.weight]["projector"]
    assert found is projector  # a script may refer to it
    assert (found.rank, found.basis.tolist(), found.inner) == (2, torch.eye(2).tolist(), {"n": 0})
    assert (found.last, found.last.maxlen, vars(found).keys()) == (deque([2]), 2, {"rank", "basis", "last", "inner"})
    optimizer.state.clear()
    snapshots.restore(1)
    assert vars(optimizer.state[model.weight]["projector"]).keys() == vars(projector).keys()
    assert not optimizer.state[model.bias]


def test_an_object_with_a_parameter_is_refused(snapshots):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots.protect("model", model)
    snapshots.protect("optimizer", optimizer)
    optimizer.state[model.weight]["projector"] = found = Projector(2)
    found.inner["of"] = [model.weight]
    with pytest.raises(
        ScriptError, match=r"projector is an object with a parameter, of which a snapshot would make a copy"
    ):
        snapshots.capture_now(1)


class Hidden:
    """A property is in the place of its table of attributes."""

    @property
    def __dict__(self):
        return {}


class Removed:
    def __del__(self):
        pass


@pytest.mark.parametrize("kind", [Hidden, Removed, threading.Lock, nn.ReLU])
def test_other_objects_in_the_state_of_an_optimizer_are_refused(snapshots, kind):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots.protect("model", model)
    snapshots.protect("optimizer", optimizer)
    optimizer.state[model.weight]["other"] = kind()
    with pytest.raises(ScriptError, match=r"other is a .*, which a snapshot cannot hold"):
        snapshots.capture_now(1)


def share(optimizer, one, other):
    optimizer.state[one]["projector"] = optimizer.state[other]["projector"] = Projector(2)


def share_in_groups(optimizer, one, other):
    optimizer.param_groups[0]["projector"] = optimizer.param_groups[1]["projector"] = Projector(2)


def refer_to_itself(optimizer, one, other):
    optimizer.state[one]["projector"] = found = Projector(2)
    found.inner["outer"] = found


@pytest.mark.parametrize("put", [share, share_in_groups, refer_to_itself])
def test_an_object_in_two_places_of_the_state_is_refused(snapshots, put):
    """A snapshot would make two of it."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": [each]} for each in model.parameters()], lr=0.1)
    snapshots.protect("model", model)
    snapshots.protect("optimizer", optimizer)
    put(optimizer, model.weight, model.bias)
    with pytest.raises(ScriptError, match="is an object that the state has in another place, too"):
        snapshots.capture_now(1)


def test_optimizer_state_that_a_step_writes_before_its_copy_is_read(snapshots, monkeypatch):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    snapshots.protect("model", model)
    snapshots.protect("optimizer", optimizer)
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    submit = snapshots.copy_thread.submit

    def after_a_write(capture):
        optimizer.state[model.weight]["momentum_buffer"].mul_(0.1)
        submit(capture)

    monkeypatch.setattr(snapshots.copy_thread, "submit", after_a_write)
    snapshots.begin(1)
    snapshots.wait()
    assert 1 not in snapshots.held()
    assert not snapshots.is_untouched()


def test_values_in_an_optimizers_state_are_those_of_the_end_of_the_step(snapshots, monkeypatch):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    snapshots.protect("optimizer", optimizer)
    trained(snapshots, model)
    state = optimizer.state[model.weight]
    state.update(count=0, history=[0])
    optimizer.state["all"] = {"seen": [0]}
    submit = snapshots.copy_thread.submit

    def after_a_write(capture):
        state["count"] += 1
        state["history"].append(1)
        optimizer.state["all"]["seen"].append(1)
        submit(capture)

    monkeypatch.setattr(snapshots.copy_thread, "submit", after_a_write)
    snapshots.begin(3)
    snapshots.restore(3)
    assert dict(optimizer.state[model.weight]) == {"count": 0, "history": [0]}
    assert optimizer.state["all"] == {"seen": [0]}


def test_a_script_that_writes_optimizer_state_early_is_known(snapshots):
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    snapshots.protect("model", model)
    snapshots.protect("optimizer", optimizer)
    model(torch.ones(8)).sum().backward()
    optimizer.step()
    snapshots.begin(1)
    snapshots.end_early(look=True)
    optimizer.state[model.weight]["momentum_buffer"].mul_(0.1)
    snapshots.check_writes()
    assert not snapshots.is_untouched()  # from now on each copy is complete when its step ends
