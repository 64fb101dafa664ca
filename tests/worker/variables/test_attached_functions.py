"""State in closures of functions that only a protected object refers to: DDP's communication hook, a schedule, a wrapper's hook."""

import functools

import pytest
import torch
import torch.distributed as dist
from snapshot_kit import in_child
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, SequentialLR

from deadpool_run.worker.variables.variables import Variables


def counting(*_fixed):
    """A function that counts its calls, and returns the count."""
    calls = 0

    def count(*_):
        nonlocal calls
        calls += 1
        return calls

    return count


class Counter:
    """An object of the script's own class that counts."""

    def __init__(self):
        self.calls = 0

    def count(self, *_):
        self.calls += 1
        return self.calls


def add(count, *_):
    return count()


KINDS = {
    "closure": counting,
    "method": lambda: Counter().count,
    "partial call": lambda: functools.partial(add, counting()),
    "object": Counter,
}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def hook_of_ddp(function):
    """A bare model: the loop has no variable with the hook."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    model.register_comm_hook(None, lambda state, bucket: function(state, bucket))  # noqa: PLW0108 - DDP asks for these names
    return model


def state_of_hook_of_ddp(function):
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    model.register_comm_hook(Held(function), lambda state, bucket: (state, bucket))
    return model


def forward_hook_of_ddp(function):
    model = DistributedDataParallel(torch.nn.Linear(1, 1))
    model.register_forward_hook(lambda *_: function() and None)
    return model


def schedule(function):
    return LambdaLR(sgd(torch.nn.Linear(1, 1)), function)


def inner_schedule(function):
    optimizer = sgd(torch.nn.Linear(1, 1))
    return SequentialLR(optimizer, [LambdaLR(optimizer, function), LambdaLR(optimizer, lambda _: 1.0)], [2])


class Held:
    """A protected object that has a function."""

    def __init__(self, function):
        self.function = function

    def state_dict(self):
        return {}


OF_DDP = [hook_of_ddp, state_of_hook_of_ddp, forward_hook_of_ddp]
PLACES = [*OF_DDP, schedule, inner_schedule, Held]


def count_of(taken, place, kind, until):
    """Count until some number, and put the first snapshot; return what it counts then."""
    if place in OF_DDP:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    protected, function = prepare(place, KINDS[kind]())
    variables = Variables()
    parts = protected.module.named_modules() if isinstance(protected, DistributedDataParallel) else ()
    variables.begin([protected], [*parts])
    run(function, until)
    if not taken:
        taken.append(variables.take())
        run(function, 3)
    variables.put(taken[0])
    if dist.is_initialized():
        dist.destroy_process_group()
    return function[0]()


def prepare(place, made):
    """Return the protected object, and the function in something that no snapshot looks into."""
    function = made.count if isinstance(made, Counter) else made
    return place(function), Hidden([function])


class Hidden(list):
    """A list that snapshots do not keep, because its class has slots."""

    __slots__ = ()


def run(function, times):
    for _ in range(times):
        function[0]()


def both(place, kind):
    taken = Hidden()
    first = count_of(taken, place, kind, 5)
    return first, count_of(taken, place, kind, 1)


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES, ids=lambda each: each.__name__)
def test_a_count_in_a_function_of_a_protected_object_comes_back(place, kind):
    first, replaced = in_child(both, place, kind)
    assert replaced == first
