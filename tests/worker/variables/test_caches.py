"""Functions with `functools.lru_cache`: the trial's second run computes their results again, if these are data."""

import functools

import numpy as np
import pytest
import torch
from kit.taken import Taken

from deadpool_run.worker.variables.variables import Variables


def random_numbers(_):
    return torch.rand(2), {"more": [np.random.default_rng().random(3), 1.5, None]}


def made_by(wrap, compute):
    """A function that counts how often it computes."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return compute(*args, **kwargs)

    return wrap(counted), calls


def restored(variables, *, trying):
    variables.begin()
    taken = Taken([variables.take()])
    variables.trying = trying
    variables.put(taken[0])


@pytest.mark.parametrize(
    "wrap", [functools.cache, functools.lru_cache(4), functools.lru_cache(typed=True)], ids=["all", "few", "typed"]
)
@pytest.mark.parametrize("trying", [True, False])
def test_the_trial_has_data_computed_again(wrap, trying):
    function, calls = made_by(wrap, random_numbers)
    function((1, "a"))
    restored(Variables(), trying=trying)
    function((1, "a"))
    assert len(calls) == (2 if trying else 1)


@pytest.mark.parametrize("made", [torch.nn.Linear, lambda *_: print, lambda *_: [iter(())]])
def test_what_a_replacement_makes_in_set_up_is_made_once(made):
    function, calls = made_by(functools.cache, made)
    first = function(1, 1)
    restored(Variables(), trying=True)
    assert function(1, 1) is first
    assert len(calls) == 1


class Noise:
    """Draws once for each argument, in the ways in which a class may keep results."""

    limited = functools.lru_cache(8)(lambda _self, _: {"it": torch.rand(2), "of": {}})
    unlimited = functools.cache(lambda _self, _: {"it": torch.rand(2), "of": {}})
    static = staticmethod(functools.cache(lambda _: torch.rand(2)))
    of_class = classmethod(functools.cache(lambda _cls, _: torch.rand(2)))


@pytest.mark.parametrize("name", ["limited", "unlimited", "static", "of_class"])
def test_a_method_computes_again_whatever_its_object_is(name):
    noise = Noise()
    first = getattr(noise, name)(1)
    restored(Variables(), trying=True)
    assert getattr(noise, name)(1) is not first
