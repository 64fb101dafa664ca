"""Hooks that a script registers while it trains come back, or what stands for them refuses to be called."""

import functools

import pytest
import torch
from torch import nn

from deadpool_run.errors import RefusedError
from deadpool_run.worker.codec import copied
from deadpool_run.worker.state.script_hooks import ScriptHooks
from deadpool_run.worker.variables.values.lost import raise_refused


class Double:
    """A hook of the script's own, as an object."""

    def __call__(self, _module, _inputs, output):
        return 2 * output


class Rank:
    """A process of a rank. `first` is a hook of set-up."""

    def __init__(self):
        self.model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Identity())
        nn.init.ones_(self.model[0].weight)
        self.weight = self.model[0].weight
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0)
        self.first = self.model.register_forward_hook(lambda _module, _inputs, output: output + 10)
        self.hooks = ScriptHooks()
        modules = [(f"protected model.{path}".rstrip("."), each) for path, each in self.model.named_modules()]
        owners = [*modules, ("protected weight", self.weight), ("the optimizer sgd", self.optimizer)]
        self.hooks.begin(owners, {__name__})

    def taken(self):
        return copied(self.hooks.take())

    def put(self, taken):
        self.hooks.put(taken, raise_refused)

    def output(self):
        return self.model(torch.ones(1)).item()

    def gradient(self):
        self.weight.grad = None
        self.model(torch.ones(1)).sum().backward()
        return self.weight.grad.item()


def test_hooks_of_set_up_are_not_in_a_snapshot():
    assert Rank().taken() == {}


def test_a_survivor_has_the_hooks_that_it_had():
    rank = Rank()
    before = rank.taken()
    rank.first.remove()
    rank.model[1].register_forward_hook(Double())
    rank.model[0].register_forward_pre_hook(lambda _module, args, kwargs: ((args[0] * 3,), kwargs), with_kwargs=True)
    rank.weight.register_hook(functools.partial(torch.mul, 5))
    rank.weight.register_hook(lambda gradient: gradient * 7)
    then = rank.taken()
    assert (rank.output(), rank.gradient()) == (6.0, 210.0)
    later = rank.model.register_forward_hook(lambda _module, _inputs, output: output * 100)
    rank.put(then)
    assert (rank.output(), rank.gradient()) == (6.0, 210.0)
    assert later.id not in rank.model._forward_hooks
    rank.put(before)
    assert (rank.output(), rank.gradient()) == (11.0, 5.0)  # a hook of torch's function is not the script's
    rank.put(then)
    assert (rank.output(), rank.gradient()) == (6.0, 210.0)
    assert rank.taken() == then


def test_a_replacement_has_no_hook_that_was_removed():
    rank, replacement = Rank(), Rank()
    rank.first.remove()
    replacement.put(rank.taken())
    assert replacement.output() == 1.0


@pytest.mark.parametrize("use", [Rank.output, Rank.gradient, lambda rank: rank.optimizer.step()])
def test_a_replacement_that_would_miss_a_hook_is_refused(use):
    rank, replacement = Rank(), Rank()
    if use is Rank.output:
        rank.model[1].register_forward_hook(Double())
    elif use is Rank.gradient:
        rank.weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.mul_(2))
    else:
        rank.optimizer.register_step_post_hook(lambda _optimizer, _args, _kwargs: None)
    replacement.put(rank.taken())
    replacement.weight.grad = torch.ones_like(replacement.weight)
    with pytest.raises(RefusedError, match=r"a hook of .* was registered while the script trained"):
        use(replacement)
    replacement.put({})
    use(replacement)


def test_hooks_of_libraries_and_those_that_are_gone_by_the_end_of_a_step_do_not_matter():
    rank = Rank()
    handle = rank.model.register_forward_hook(Double())
    handle.remove()
    rank.model.register_forward_hook(nn.Module.forward)
    assert rank.taken() == {}
