"""Functions, modules and data loaders that the script makes in its loop come back, or nobody can use what stands for them."""

import functools
import types

import pytest
import torch
from kit.taken import Taken
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deadpool_run.errors import RefusedError
from deadpool_run.worker.variables.values.objects import OpaqueError
from deadpool_run.worker.variables.values.reader import ValueReader
from deadpool_run.worker.variables.variables import Variables


def scaled(module, x):
    return nn.Linear.forward(module, x) * 2


class Act(nn.Module):
    def forward(self, x):
        return x


def with_function(module):
    module.scale = lambda: 2
    return module


MADE = {
    "function": lambda: lambda: 1,
    "method": lambda: types.MethodType(lambda _: 1, object()),
    "partial call": lambda: functools.partial(lambda: 1),
    "class": lambda: type("Other", (), {}),
    "module with a function": lambda: with_function(nn.Linear(1, 1)),
    "data loader": lambda: DataLoader(TensorDataset(torch.ones(3))),
}


class Rank:
    """A process of a rank, with a protected model and a variable of its loop."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(1, 1), Act(), nn.Tanh())
        self.variables, self.value = Variables(), None
        parts = [(f"model.{path}" if path else "model", each) for path, each in self.model.named_modules()]
        self.variables.begin([self.model], parts)

    def loop(self, make, *, put=None):
        """Make something else for a variable; then put the snapshot of before, or another's. Return the variable, and that snapshot."""
        current, taken, kept = make(), Taken(), Taken()
        self.variables.begin()
        if put is None:
            current = make()
            kept.append(current)
            taken.append(self.variables.take())
            current = make() if taken else current
        self.variables.put(put or taken[0])
        self.variables.take()  # as after each restore: that alone does not use what was lost
        return current, kept, taken


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_what_was_made_in_the_loop(make):
    """A survivor has it again. A replacement, which never had it, is refused when it uses it."""
    current, kept, taken = Rank().loop(make)
    assert current is kept[0]
    current, _, _ = Rank().loop(make, put=taken[0])
    with pytest.raises(RefusedError, match="it was made after the loop had begun"):
        current()


def test_a_loader_that_is_made_when_it_is_first_needed():
    def run(taken=None):
        variables, loader = Variables(), None
        variables.begin()
        if taken is None:
            loader = MADE["data loader"]()
            return variables.take(), loader
        variables.put(taken)
        return loader

    taken, _ = run()
    assert run(taken) is None  # and is made when a replacement needs it


def test_what_the_first_steps_have_made_is_that_of_the_rehearsal():
    def run(taken=None):
        variables, current, other = Variables(), None, None
        variables.begin()
        current, other = (lambda: "current"), (lambda: "other")
        variables.rehearsed()
        if taken is None:
            current, other = other, current
            return variables.take(), variables.too_large
        variables.put(taken)
        return current(), other()

    taken, warned = run()
    assert run(taken) == ("other", "current")
    assert not warned


def test_a_warning_comes_once_for_what_is_carried_from_step_to_step():
    variables, carried, fresh = Variables(), None, None
    variables.begin()
    variables.rehearsed()
    carried = lambda: 1  # noqa: E731
    for _ in range(3):
        fresh = lambda: 2  # noqa: E731
        variables.take()
    fresh = None
    assert list(variables.too_large) == [
        "test_references.test_a_warning_comes_once_for_what_is_carried_from_step_to_step().carried"
    ]
    variables.too_large.clear()
    variables.take()
    assert not variables.too_large
    assert (carried(), fresh) == (1, None)


def of_the_module(model):
    model[0].forward = types.MethodType(scaled, model[0])


def of_the_scripts_class(_):
    Act.forward = lambda _self, x: x + 1


def of_torchs_class(_):
    nn.Tanh.forward = lambda _self, x: x + 1


@pytest.mark.parametrize("change", [of_the_module, of_the_scripts_class, of_torchs_class])
def test_a_forward_that_was_exchanged_in_the_loop(change, monkeypatch):
    for kind in (Act, nn.Tanh):
        monkeypatch.setattr(kind, "forward", kind.forward)  # put back after the test
    rank, x = Rank(), torch.ones(1)
    at_first, results = rank.variables.take(), [rank.model(x)]
    change(rank.model)
    results.append(rank.model(x))
    kept = (
        Act.forward,
        nn.Tanh.forward,
        rank.model[0].forward,
    )  # else nothing refers to them once others are in their place
    taken = rank.variables.take()
    for snapshot, result in ((at_first, results[0]), (taken, results[1])):
        rank.variables.put(snapshot)
        assert torch.equal(rank.model(x), result), kept
    rank.variables.put(at_first)
    replacement = Rank()
    replacement.variables.put(taken)
    if change is of_the_module:
        assert replacement.model[0].forward.__func__ is scaled  # its name says which it is
    else:
        with pytest.raises(RefusedError, match="forward is carried from step to step"):
            replacement.model(x)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *[("os", "system"), ("builtins", "eval"), ("torch", "load"), ("torch.nn.functional", "torch.load")],
        *[(__name__, "types.FunctionType"), (__name__, "DataLoader"), ("torch.hub", "load")],
    ],
)
def test_a_snapshot_cannot_name_code_of_others(module, name):
    """It may come from a file that somebody has written."""
    for node in (["code", module, name], ["partial", ["code", module, name], [], [], []]):
        with pytest.raises(OpaqueError):
            ValueReader(own={__name__}).read(node)
    assert ValueReader(own={__name__}).read(["code", __name__, "scaled"]) is scaled
