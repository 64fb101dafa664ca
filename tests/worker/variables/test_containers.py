"""Objects in containers of all kinds, beside parts that no snapshot holds, come back."""

import functools
from collections import OrderedDict, defaultdict, deque
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from kit.taken import Taken
from torch import nn

from deadpool_run.worker.variables.containers import OTHERS
from deadpool_run.worker.variables.variables import Variables


class Agent:
    """An object of the script's, with parts that no snapshot holds."""

    def __init__(self):
        self.logs, self.count, self.sums = [Taken(), Taken()], 0, torch.zeros(3)

    def act(self):
        self.count += 1
        self.sums += self.count

    def state(self):
        return self.count, self.sums.tolist()


class Meter(nn.Module):
    """A module without parameters, which a script need not protect."""

    def __init__(self):
        super().__init__()
        self.count = 0
        self.register_buffer("sums", torch.zeros(3))

    def act(self):
        self.count += 1
        self.sums += self.count

    def state(self):
        return self.count, self.sums.tolist()


class OwnDict(dict):
    pass


class OwnList(list):
    pass


class Pair(NamedTuple):
    one: object
    other: object


WAYS = {
    "a dict by numbers": (lambda each: {0: each, 1: Taken()}, lambda box: box[0]),
    "a dict by names and numbers": (lambda each: {"log": Taken(), 1: each}, lambda box: box[1]),
    "a dict by tuples": (lambda each: {(0, "a"): each, (1, "b"): Taken()}, lambda box: box[0, "a"]),
    "a dict by None": (lambda each: {None: each, True: Taken()}, lambda box: box[None]),
    "a dict by names": (lambda each: {"it": each, "log": Taken()}, lambda box: box["it"]),
    "an own dict": (lambda each: OwnDict({1: each, 2: Taken()}), lambda box: box[1]),
    "a defaultdict": (lambda each: defaultdict(list, {1: each, 2: Taken()}), lambda box: box[1]),
    "an ordered dict": (lambda each: OrderedDict({1: each, 2: Taken()}), lambda box: box[1]),
    "a list": (lambda each: [each, Taken()], lambda box: box[0]),
    "an own list": (lambda each: OwnList([each, Taken()]), lambda box: box[0]),
    "a tuple": (lambda each: (each, Taken()), lambda box: box[0]),
    "a named tuple": (lambda each: Pair(each, Taken()), lambda box: box.one),
    "a deque": (lambda each: deque([each, Taken()]), lambda box: box[0]),
    "a set": (lambda each: {each}, lambda box: next(iter(box))),
    "a list in a list": (lambda each: [[Taken(), each]], lambda box: box[0][1]),
    "a dict in a list": (lambda each: [{1: each, "log": Taken()}], lambda box: box[0][1]),
    "dicts in a dict": (lambda each: {"a": {1: {2: each}}}, lambda box: box["a"][1][2]),
    "a tuple in a deque in a dict": (lambda each: {1: deque([(each, Taken())])}, lambda box: box[1][0][0]),
    "a namespace": (lambda each: SimpleNamespace(it={1: [each]}), lambda box: box.it[1][0]),
    "a closure": (lambda each: lambda: each, lambda box: box()),
    "a closure in a dict": (lambda each: {1: lambda: each}, lambda box: box[1]()),
    "a closure in a list": (lambda each: [lambda: each, Taken()], lambda box: box[0]()),
    "a method in a dict": (lambda each: {1: each.act}, lambda box: box[1].__self__),
    "a method in a list": (lambda each: [each.act, Taken()], lambda box: box[0].__self__),
    "a partial in a list": (lambda each: [functools.partial(print, each)], lambda box: box[0].args[0]),
}


@pytest.mark.parametrize("made", [Agent, Meter])
@pytest.mark.parametrize("way", WAYS)
def test_an_object_in_a_container_comes_back(way, made):
    put_into, taken_from = WAYS[way]

    def loop(taken, *, steps):
        box, variables = put_into(made()), Variables()
        variables.begin()
        if steps:
            taken_from(box).act()
        taken.append(variables.take())
        if not steps:
            variables.put(taken[0])
        return taken_from(box).state(), variables.left_alone, variables.too_large

    taken = Taken()
    assert loop(taken, steps=1) == loop(taken, steps=0)


@pytest.mark.parametrize(
    "box",
    [
        lambda: {0: Taken(), 1: Taken(), 2: 0, 3: []},
        lambda: [Taken(), Taken(), 0, []],
        lambda: deque([Taken(), Taken(), 0, []]),
    ],
)
def test_numbers_beside_several_parts_come_back(box):
    def loop(taken, *, steps):
        parts, variables = box(), Variables()
        variables.begin()
        if steps:
            parts[2] += 5
            parts[3].append(parts[2])
        taken.append(variables.take())
        if not steps:
            variables.put(taken[0])
        return parts[2], parts[3]

    taken = Taken()
    assert loop(taken, steps=1) == loop(taken, steps=0) == (5, [5])


def test_a_dict_by_names_gets_other_keys_in_the_loop():
    def loop(taken, *, steps):
        box, variables = {"log": Taken(), "more": Taken(), "best": 1.0}, Variables()
        variables.begin()
        for step in range(steps):
            box[step] = [step]
            box[step, "why"] = "a reason"
        taken.append(variables.take())
        if not steps:
            box[99] = "of a step that is undone"
            variables.put(taken[0])
        return [(key, value) for key, value in box.items() if not isinstance(value, Taken)]

    taken = Taken()
    found = loop(taken, steps=2)
    assert found == loop(taken, steps=0)
    assert OTHERS not in dict(found)


def test_a_step_that_adds_other_keys_to_a_dict_is_undone():
    box, variables = {"log": Taken(), "more": Taken()}, Variables()
    variables.begin()
    taken = variables.take()
    box[1], box["new"] = 1, 1
    variables.put(taken)
    assert [*box] == ["log", "more"]
