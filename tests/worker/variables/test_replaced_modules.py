"""A module that the script puts in the place of another comes back, or nobody can call what stands for it."""

import pytest
from torch import nn

from deadpool_run.errors import RefusedError
from deadpool_run.worker.variables.variables import Variables


class Rank:
    """A process of a rank, with a protected model that has an activation."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()), nn.Identity())
        self.variables = Variables()
        parts = [(f"model.{path}" if path else "model", each) for path, each in self.model.named_modules()]
        self.variables.begin([self.model], parts)

    @property
    def activation(self):
        return self.model[1][0]


def test_a_survivor_has_the_module_that_it_had():
    rank = Rank()
    first = rank.activation
    at_first = rank.variables.take()
    rank.model[1][0] = second = nn.Sequential()
    rank.model[2] = None
    then = rank.variables.take()
    rank.model[1][0], rank.model[2] = nn.Mish(), first
    rank.variables.put(then)
    assert rank.activation is second
    assert rank.model[2] is None
    rank.variables.put(at_first)
    assert rank.activation is first
    assert type(rank.model[2]) is nn.Identity


def test_a_module_that_was_removed_comes_back_to_its_place_and_goes_again():
    model = nn.Sequential(nn.Flatten(), nn.ReLU(), nn.Identity())
    variables, first = Variables(), list(model)
    variables.begin([model], [("model", model)])
    before = variables.take()
    del model[1]  # the later ones get other numbers
    model.add_module("extra", nn.Tanh())
    after, now = variables.take(), list(model)
    variables.put(before)
    assert list(model)[:3] == first
    variables.put(after)
    assert list(model) == now


def test_a_replacement_cannot_call_a_module_that_it_never_had():
    rank, replacement = Rank(), Rank()
    rank.model[1][0] = nn.GELU()
    taken = rank.variables.take()
    assert list(rank.variables.too_large) == ["the module model.1.0"]  # which is warned of
    replacement.variables.put(taken)
    assert len(list(replacement.model.modules())) == 5  # it can be looked at
    with pytest.raises(RefusedError, match=r"the module model\.1\.0 was put in place of another.*\n"):
        replacement.model[1](None)
    replacement.variables.put(Rank().variables.take())
    assert type(replacement.activation) is nn.ReLU


def test_many_new_modules_are_not_all_remembered():
    rank = Rank()
    rank.model[1][0] = nn.GELU()
    old = rank.variables.take()
    for _ in range(99):
        rank.model[1][0] = nn.GELU()
        new = rank.variables.take()
    last = rank.activation
    rank.variables.put(old)
    with pytest.raises(RefusedError, match="was put in place"):
        rank.activation(None)
    rank.variables.put(new)
    assert rank.activation is last
