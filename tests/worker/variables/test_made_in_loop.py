"""Values of other people's classes that the script makes in its loop come back, or nobody can use what stands for them."""

import concurrent.futures
import io
import re
import subprocess
import sys
import time
import types
import uuid
import weakref
from collections import OrderedDict, deque

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


class Owner:
    def __init__(self, descriptor):
        self.descriptor = descriptor

    def __del__(self):
        closed.append(self.descriptor)


class Peekable:
    def __init__(self, of):
        self.of, self.ahead = iter(of), []

    def __iter__(self):
        return self

    def __next__(self):
        return next(self.of)


class Slotted:
    __slots__ = ("__dict__", "a")


closed = []


class Node(list):
    """A list of the script's that refers to itself, and to one of its items."""


class Cache:
    def __init__(self):
        self.keys, self.seen = [torch.ones(2)], 0


LIBRARY = types.ModuleType("of_a_library")
for each in (Outputs, Cache, Owner, Peekable, Slotted):
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
            value = make(self)
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


def matches(_):
    return {"best": 0.5, "found": [re.match("(a)", "ab"), 7]}


def test_a_container_with_a_part_that_cannot_be_kept_comes_back_without_it():
    first, now = survivor(matches)
    assert now == first
    assert now["found"][0] is first["found"][0]
    found = replacement(matches)[1]
    assert (found["best"], found["found"][1], len(found["found"])) == (0.5, 7, 2)
    with pytest.raises(
        RefusedError, match=r"an object of class re\.Match in .*Rank.loop.* is carried from step to step"
    ):
        found["found"][0].group()


def running(_):
    future = concurrent.futures.Future()
    return {"pending": deque([(3, future)]), "logs": {"out": io.StringIO("a")}, "step": 3}


def test_what_runs_in_the_lost_process_is_left_out_of_containers():
    """A replacement has nothing to wait for."""
    first, now = survivor(running)
    assert now["pending"][0][1] is first["pending"][0][1]
    found = replacement(running)[1]
    assert found == {"pending": deque(), "logs": {}, "step": 3}


def test_objects_of_set_up_without_weak_references_have_names():
    def run(taken=None):
        variables, found = Variables(), [1.0, re.match("a", "a")]
        variables.begin()
        if taken is None:
            found[0] = 2.0
            return variables.take()
        variables.put(taken)
        return found[0], found[1].group()

    assert run(Taken([run()])[0]) == (2.0, "a")


def test_a_process_of_a_survivor_may_have_ended():
    def make(_):
        with subprocess.Popen(["true"]) as process:
            return [process, 1]

    first, now = survivor(make)
    assert now == first
    assert replacement(make)[1] == [1]


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


@pytest.mark.parametrize("make", [lambda _: [Owner(7), 1], lambda _: [Slotted(), 1]])
def test_objects_with_more_than_attributes_are_not_made(make):
    closed.clear()
    first, now = survivor(make)
    assert now[0] is first[0]
    _, now = replacement(make)
    assert now[1] == 1
    with pytest.raises(RefusedError, match="only the code of its class"):
        now[0].a  # noqa: B018 - it is used
    assert not closed or closed == [7] * len(closed)


def test_a_container_keeps_its_parts_after_a_second_loss():
    _, found = replacement(matches)
    _, again = replacement(lambda _: found)
    assert (again["best"], again["found"][1]) == (0.5, 7)
    with pytest.raises(RefusedError, match=r"an object of class re\.Match in .*Rank\.loop"):
        again["found"][0].group()


@pytest.mark.parametrize("make", [lambda _: {re.match("a", "a")}, lambda _: {re.match("a", "a"): 1}])
def test_a_stand_in_is_no_key(make):
    first, now = survivor(make)
    assert now == first
    _, now = replacement(make)
    with pytest.raises(RefusedError):
        len(now)


def test_data_beside_a_future_is_not_left_out():
    def make(_):
        future = concurrent.futures.Future()
        return [(future, torch.ones(2)), (3, future)]

    _, now = replacement(make)
    assert len(now) == 1
    assert now[0][1].tolist() == [1, 1]
    with pytest.raises(RefusedError):
        now[0][0].result()


def test_exceptions_that_cannot_be_made_again():
    class InnerError(UnicodeDecodeError):
        def __init__(self):
            super().__init__("utf-8", b"", 0, 1, "why")

    for error in (InnerError(), ExceptionGroup("all", [ValueError(1)])):
        first, now = survivor(lambda _, error=error: [error, 1])
        assert now[1] == first[1] == 1


def test_many_new_objects_do_not_push_out_others():
    made = MadeLater(4, 2)
    kept, many = Cache(), [Cache() for _ in range(9)]
    number = made.weakly.number(kept)
    for each in many:
        made.values.number(each)
        made.weakly.number(each)
        assert made.weakly.number(kept) == number
    assert made.weakly.get(made.weakly.number(many[0])) is many[0]
    assert len(made.weakly._objects) == len(made.weakly._numbers) == 4


def test_parts_that_allow_weak_references_are_not_kept_alive():
    made, part = MadeLater(4, 2), Cache()
    number, reference = made.parts.number(part), weakref.ref(part)
    assert made.parts.get(number) is part
    del part
    assert reference() is None
    assert made.parts.get(number) is None
