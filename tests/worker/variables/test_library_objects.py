"""Objects of libraries' classes come back, if they are nothing but values and references; others are left alone."""

import os
import queue
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from deadpool_run.worker.variables.variables import Variables


class Taken(list):
    """A list that snapshots do not keep, because its class has slots."""

    __slots__ = ()


class Averager:
    """Counts calls, as torch's `PeriodicModelAverager` does."""

    def __init__(self, **parts):
        self.__dict__.update(parts)
        self.step, self.total, self.seen = 0, torch.zeros(2), []

    def __call__(self):
        self.step += 1
        self.total += self.step
        self.seen.append(self.step)


class OfLibrary(Averager):
    pass


Averager.__module__ = OfLibrary.__module__ = "of.a.library"


def as_variable(averager):
    return averager


def in_a_list(averager):
    return [averager]


def in_an_object(averager):
    return SimpleNamespace(averager=averager)


def run(taken, *, steps, where, **parts):
    """Go so many steps, take a snapshot or use the one taken before, go one more, and put back. Returns what the object holds."""
    variables, averager = Variables(), OfLibrary(**parts)
    holder = where(averager)  # noqa: F841 - a variable of the script
    variables.begin()
    for _ in range(steps):
        averager()
    taken.append(variables.take())
    averager()
    variables.put(taken[0])
    return averager.step, averager.total.tolist(), averager.seen


@pytest.mark.parametrize("where", [as_variable, in_a_list, in_an_object])
@pytest.mark.parametrize("rehearsed", [0, 2, 5])
def test_its_values_come_back(where, rehearsed):
    model = nn.Linear(2, 2)
    references = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "function": torch.relu,
        "kinds": [torch.float32, nn.Linear],
        "groups": {1: None, 2: [model]},
    }
    taken, expected = Taken(), (3, [6.0, 6.0], [1, 2, 3])
    assert run(taken, steps=3, where=where, **references) == expected
    assert run(taken, steps=rehearsed, where=where, **references) == expected


@pytest.mark.parametrize(
    "part",
    [queue.Queue(), iter("abc"), [queue.Queue()], SimpleNamespace],
    ids=["queue", "iterator", "list of queues", "object"],
)
def test_it_is_left_alone_if_it_has_anything_else(part):
    other = OfLibrary() if part is SimpleNamespace else part
    assert run(Taken(), steps=3, where=as_variable, other=other)[0] == 4


def test_the_environment_is_left_alone(monkeypatch):
    monkeypatch.setattr(os.environ, "_data", {b"A": b"1"})  # few, as in a container
    variables, environment = Variables(), os.environ
    variables.begin()
    taken = variables.take()
    environment["A"] = "2"
    variables.put(taken)
    assert os.environ["A"] == "2"
