"""Modules that the script makes in its loop: copies of the best model, of past ones, of the average."""

import copy
import functools

import pytest
import torch
from kit.taken import Taken
from torch import nn

from deadpool_run.errors import RefusedError
from deadpool_run.worker.variables.variables import Variables

STEPS = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.norm = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 1)]), nn.BatchNorm1d(1)
        self.tied, self.scale, self.seen = self.layers[0].weight, 2.0, []

    def forward(self, x):
        self.seen.append(len(x))
        return self.norm(self.layers[1](torch.relu(self.layers[0](x)))) * self.scale


class League:
    def __init__(self):
        self.past = []


def train(net, step):
    with torch.no_grad():
        for number, each in enumerate(net.parameters()):
            each.add_(0.1 * step * (number + 1))
    return copy.deepcopy(net).eval().requires_grad_(requires_grad=False)


def outputs(modules):
    return [[each(torch.ones(3, 2)).tolist(), each.training, each.scale, each.seen] for each in modules]


def best(steps, taken):
    """The best model so far, in a variable; the snapshot is of step 4 of 6."""
    torch.manual_seed(0)
    variables, net, best_model = Variables(), Net(), None
    variables.begin()
    for step in range(steps):
        if step in (1, 3, 5):
            best_model = train(net, step)
        if step == 4 and not taken:
            taken.append(variables.take())
            taken.extend(outputs([best_model]))
    variables.put(taken[0])
    return outputs([best_model]), taken[1:]


def league(steps, taken):
    """Past models, in the list of an object, in a dict, and in a list of set-up."""
    torch.manual_seed(0)
    variables, net, past, table = Variables(), Net(), League(), {"past": []}
    snaps = []
    variables.begin()
    for step in range(steps):
        if step % 2:
            past.past.append(train(net, step))
            snaps.append(past.past[-1])
            table["past"].append(train(net, step + 1))
        if step == 4 and not taken:
            taken.append(variables.take())
            taken.extend(outputs([*past.past, *table["past"], *snaps]))
    variables.put(taken[0])
    assert all(map(lambda one, other: one is other, snaps, past.past))
    return outputs([*past.past, *table["past"], *snaps]), taken[1:]


@pytest.mark.parametrize("loop", [best, league])
@pytest.mark.parametrize("steps", [0, 2, STEPS])
def test_a_module_that_was_made_in_the_loop_comes_back(loop, steps):
    taken = Taken()
    now, then = loop(STEPS, taken)
    assert now == then
    assert then
    assert loop(steps, Taken(taken[:])) == (then, then)


def test_a_module_that_this_process_still_has_is_filled():
    """Its optimizer, say, has its parameters, too."""
    variables, head = Variables(), None
    variables.begin()
    head = nn.Sequential(nn.Linear(1, 1))
    inside, weight = head[0], head[0].weight
    taken = Taken([variables.take()])
    before = weight.item()
    with torch.no_grad():
        weight += 1
    variables.put(taken[0])
    assert head[0] is inside
    assert inside.weight is weight
    assert weight.item() == before


def unkept(steps, taken):
    """Functions that were made in the loop, in containers of set-up and of later."""
    variables, calls, table, later = Variables(), [], {"f": []}, None
    variables.begin()
    for step in range(steps):
        calls.append(lambda: 1)
        table["f"].append(functools.partial(lambda n: n, step))
        later = [lambda: 2]
        if step == 2 and not taken:
            taken.append(variables.take())
    variables.put(taken[0])
    return calls, table, later


def test_a_container_with_a_function_that_was_made_in_the_loop_is_refused_when_it_is_used():
    taken = Taken()
    unkept(4, taken)
    calls, table, later = unkept(0, taken)
    for use in (lambda: calls[0], lambda: len(table), lambda: later[0]):
        with pytest.raises(RefusedError, match="made after the loop had begun"):
            use()


def decorated(function):
    @functools.wraps(function)
    def wrapped(*given):
        return function(*given)

    return wrapped


@decorated
def of_a_decorator(steps, taken):
    variables, count = Variables(), 0
    variables.begin()
    for step in range(steps):
        count += 1
        if step == 2 and not taken:
            taken.append(variables.take())
    variables.put(taken[0])
    return count


def test_a_decorated_functions_variables_and_its_decorators_are_told_apart():
    """Both were called `of_a_decorator()`, and the values of one were written into the other."""
    taken = Taken()
    assert of_a_decorator(5, taken) == 3
    assert of_a_decorator(1, taken) == 3
