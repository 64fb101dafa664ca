"""Values of other people's classes that the script makes in its loop come back, or nobody can use what stands for them."""

import re
import sys
import time
import types
import uuid
from collections import OrderedDict

import numpy as np
import pytest
import torch
from kit.taken import Taken
from torch import nn
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from deadpool_run.errors import RefusedError
from deadpool_run.worker.state.numbered import MadeLater
from deadpool_run.worker.variables.variables import Variables


class DivergedError(RuntimeError):
    def __init__(self, step, loss):
        super().__init__(f"diverged at {step}")
        self.step, self.loss = step, loss


class Outputs(OrderedDict):
    """As the outputs of a library's models: a dict whose items are attributes, too."""

    def __init__(self, **values):
        for name, value in values.items():
            OrderedDict.__setitem__(self, name, value)
            vars(self)[name] = value

    def __setitem__(self, name, value):
        raise AssertionError("code of the library")

    def __setattr__(self, name, value):
        raise AssertionError("code of the library")


class Peekable:
    def __init__(self, of):
        self.of, self.ahead = iter(of), []

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.of)


class Node(list):
    """A list of the script's that refers to itself, and to one of its items."""


class Cache:
    def __init__(self):
        self.keys, self.seen = [torch.ones(2)], 0


LIBRARY = types.ModuleType("of_a_library")
for each in (Outputs, Cache, Peekable):
    each.__module__, LIBRARY.__dict__[each.__name__] = LIBRARY.__name__, each


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setitem(sys.modules, LIBRARY.__name__, LIBRARY)


class Rank:
    """A process of a rank, with a protected model, its optimizer, and variables that the loop sets."""

    def __init__(self):
        self.model = nn.Linear(2, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.variables, self.value = Variables(), None

    def loop(self, make, *, put=None):
        """Make a value, and another one after a snapshot of it; or put that of another rank. Return the value, the first one, the snapshot."""
        value, kept, taken = None, Taken(), Taken()
        self.variables.begin([self.model, self.optimizer], [("model", self.model)])
        if put is None:
            value = make(self)
            kept.append(value)
            taken.append(self.variables.take())
            value = make(self) if taken else value
            self.variables.take()
        self.variables.put(put or taken[0])
        return value, *kept, *taken


def survivor(make):
    """Return a value from before a snapshot, and the variable after a step back to it."""
    now, first, _ = Rank().loop(make)
    return first, now


def replacement(make, rank=None):
    """Return a value of a rank that was lost, and the variable of its replacement."""
    _, first, taken = Rank().loop(make)
    (now,) = (rank or Rank()).loop(make, put=taken)
    return first, now


def restart(rank):
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(rank.optimizer, 10)
    for _ in range(3):
        rank.optimizer.step()
        scheduler.step()
    return scheduler


def cache(_):
    made = Cache()
    made.seen += 1
    return made


def squashed(_):
    made = TransformedDistribution(Normal(torch.zeros(1), torch.ones(1)), [TanhTransform()])
    made.log_prob(torch.ones(1) / 2)
    return made


def diverged(_):
    try:
        raise DivergedError(3, torch.tensor(2.0))
    except RuntimeError as error:
        return error


KEPT = {
    "exception": (lambda _: OSError(2, "gone", "a file"), lambda each: (each.args, each.errno, each.filename)),
    "exception of the script": (diverged, lambda each: (type(each), each.args, each.step, each.loss.item())),
    "time": (lambda _: time.gmtime(1), tuple),
    "identifier": (lambda _: uuid.UUID(int=5), lambda each: each),
    "ellipsis": (lambda _: (..., NotImplemented), lambda each: each),
    "pattern": (lambda _: re.compile("a+", re.IGNORECASE), lambda each: each),
    "layout": (lambda _: (torch.channels_last, torch.sparse_coo), lambda each: each),
    "class of numbers": (lambda _: {"dtype": np.float16, "kind": nn.Linear}, lambda each: each),
    "distribution": (
        lambda _: Normal(torch.zeros(1), torch.ones(1)),
        lambda each: (each.mean.item(), each.batch_shape),
    ),
    "distribution of classes": (lambda _: Categorical(logits=torch.ones(3)), lambda each: each.probs.tolist()),
    "nested distribution": (
        lambda _: Independent(Normal(torch.zeros(2), torch.ones(2)), 1),
        lambda each: each.log_prob(torch.ones(2)).item(),
    ),
    "transformed distribution": (squashed, lambda each: each.log_prob(torch.ones(1) / 2).item()),
    "schedule": (
        restart,
        lambda each: {k: v for k, v in each.state_dict().items() if isinstance(v, int | float | list)},
    ),
    "cache of a library": (cache, lambda each: (each.seen, each.keys[0].tolist())),
    "outputs of a library": (
        lambda _: Outputs(loss=torch.ones(1)),
        lambda each: (type(each), dict(each), each.loss is each["loss"]),
    ),
    "type of elements": (lambda _: np.dtype("float32"), lambda each: each),
}
PLACES = {
    "variable": (lambda value: value, lambda value: value),
    "list": (lambda value: [1.0, value], lambda value: value[1]),
    "dict": (lambda value: {"a": {"b": value}}, lambda value: value["a"]["b"]),
    "object": (lambda value: types.SimpleNamespace(part=(value,)), lambda value: value.part[0]),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("kind", KEPT.values(), ids=KEPT)
def test_it_is_kept(kind, place):
    (make, shown), (put, get) = kind, place
    for process in (survivor, replacement):
        first, now = process(lambda rank: put(make(rank)))
        assert shown(get(now)) == shown(get(first))


def test_a_schedule_refers_to_the_optimizer_of_the_process():
    rank = Rank()
    assert replacement(restart, rank)[1].optimizer is rank.optimizer


def test_an_object_of_a_library_is_the_same_one_in_a_survivor():
    first, now = survivor(cache)
    assert now is first


def test_objects_of_set_up_without_weak_references_have_names():
    def run(taken=None):
        variables, found = Variables(), [1.0, re.match("a", "a")]
        variables.begin()
        if taken is None:
            found[0] = 2.0
        taken = taken or variables.take()
        variables.put(taken)
        return taken, found[0], found[1].group()

    taken, *_ = run()
    assert run(Taken([taken])[0])[1:] == (2.0, "a")


def test_parameters_of_unprotected_modules_are_the_same_ones_in_containers_of_the_loop():
    def run(taken=None):
        variables, teacher, scales = Variables(), nn.Sequential(nn.Linear(2, 2)).requires_grad_(requires_grad=False), {}
        variables.begin()
        if taken is None:
            scales |= {each: number for number, each in enumerate(teacher.parameters())}
            kept = Taken([variables.take()])
        variables.put(taken or kept[0])
        return [scales[each] for each in teacher.parameters()], taken or kept[0]

    found, taken = run()
    assert found == run(taken)[0] == [0, 1]


def test_containers_of_the_script_may_refer_to_themselves():
    def make(_):
        made, item = Node(), [1]
        made.append(item)
        made.owner, made.last = made, item
        return made

    for process in (survivor, replacement):
        _, now = process(make)
        assert type(now) is Node
        assert now.owner is now
        assert now.last is now[0]
        assert now == [[1]]


def test_the_handle_of_a_hook_still_removes_it_in_a_survivor():
    layer = nn.Linear(1, 1)

    def make(_):
        return layer.register_forward_hook(lambda *_: None)

    first, now = survivor(make)
    assert len(layer._forward_hooks) == 2
    now.remove()
    assert len(layer._forward_hooks) == 1
    first.remove()


def test_iterators_of_libraries_are_refused():
    _, now = replacement(lambda _: Peekable([1, 2, 3]))
    with pytest.raises(RefusedError, match="its position cannot be restored"):
        next(now)


def test_many_new_objects_do_not_push_out_others():
    made = MadeLater(4)
    kept, many = Cache(), [Cache() for _ in range(9)]
    number = made.weakly.number(kept)
    for each in many:
        made.values.number(each)
        made.weakly.number(each)
        assert made.weakly.number(kept) == number
    assert made.weakly.get(made.weakly.number(many[0])) is many[0]
    assert len(made.weakly._objects) == len(made.weakly._numbers) == 4
