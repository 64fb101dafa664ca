"""Which values are as they were, by the identities of what is in them."""

import copy
import random
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass, field

import pytest
import torch

from deadpool_run.worker.variables.unchanged import are_same, may_be_dropped, parts_of
from deadpool_run.worker.variables.variables import Variables


@dataclass(frozen=True)
class Size:
    width: int
    more: dict = field(default_factory=dict)


class Other:
    pass


class OwnDict(dict):
    pass


class OwnOrdered(OrderedDict):
    pass


class OwnList(list):
    pass


class OwnDefaults(defaultdict):
    pass


class Slots:
    __slots__ = ("n",)


OWN = {__name__}


def noted(value):
    return parts_of(value, OWN, lambda _: False)


CHANGES = {
    "an item of a list": (lambda: [1, [2]], lambda value: value[1].append(3)),
    "an item of a tuple's list": (lambda: (1, [2]), lambda value: value[1].__setitem__(0, 3)),
    "a key of a dict": (lambda: {"a": 1}, lambda value: value.update(b=value.pop("a"))),
    "a value of a dict inside": (lambda: {"a": {"b": 1}}, lambda value: value["a"].update(b=2)),
    "the order of a dict": (lambda: OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "an item of a set": (lambda: {"a", "b"}, lambda value: value.add("c")),
    "the order of a deque": (lambda: deque([1, 2]), lambda value: value.rotate()),
    "an attribute": (lambda: [Size(1)], lambda value: object.__setattr__(value[0], "width", 2)),
    "a new attribute": (lambda: [Size(1)], lambda value: object.__setattr__(value[0], "height", 2)),
    "a dict in an object": (lambda: [Size(1, {"a": 1})], lambda value: value[0].more.clear()),
    "the table of an object": (lambda: [Other()], lambda value: setattr(value[0], "__dict__", {"a": 1})),
    "the class of an object": (lambda: [Other()], lambda value: setattr(value[0], "__class__", Another)),
    "an item of a derived dict": (lambda: OwnDict(a=[1]), lambda value: value["a"].append(2)),
    "an attribute of a derived dict": (lambda: OwnDict(a=1), lambda value: setattr(value, "n", 2)),
    "the order of a derived ordered dict": (lambda: OwnOrdered(a=1, b=2), lambda value: value.move_to_end("a")),
    "an item of a derived list": (lambda: [OwnList([1])], lambda value: value[0].append(2)),
    "in a circle": (lambda: circle([1]), lambda value: value[0].append(2)),
}


class Another:
    pass


def circle(value):
    whole = [value]
    value.append(whole)
    return whole


@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen(make, change):
    value = make()
    parts = noted(value)
    assert are_same(parts)
    change(value)
    assert not are_same(parts)


@pytest.mark.parametrize("value", [1, "a", None, torch.float32, 1j, b"a"])
def test_a_value_that_never_changes(value):
    assert noted(value) == ()


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(1),
        [torch.zeros(1)],
        {"a": [Slots()]},
        [iter([])],
        [random.Random(1)],
        [OwnDefaults(list)],
        [[n] for n in range(300)],
        print,
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_value_in_which_something_changes_unseen(value):
    assert noted(value) is None


def test_an_object_of_a_library():
    assert parts_of([Size(1)], set(), lambda _: False) is None


def test_what_is_kept_elsewhere():
    elsewhere = Size(1)
    parts = parts_of({"one": elsewhere}, OWN, lambda each: each is elsewhere)
    object.__setattr__(elsewhere, "width", 2)
    assert are_same(parts)


def test_what_may_be_dropped():
    assert all(map(may_be_dropped, [1, None, torch.zeros(1), [torch.zeros(1), 2], {"a": torch.zeros(1)}, (), {3}]))
    assert not any(map(may_be_dropped, [Other(), [Other()], {"a": Other()}, print, [[]], iter([])]))


class Counter:
    """An object whose attributes cannot change in place when the loop begins: it is looked at only if one of them is another."""

    limit = 3

    def __init__(self):
        self.n, self.name, self.best = 0, "a", None


def set_an_attribute(counter):
    counter.n += 1


def add_an_attribute(counter):
    counter.more = 1


def delete_an_attribute(counter):
    vars(counter).pop("name", None)


def put_a_list(counter):
    counter.best = [1]


def change_the_list(counter):
    counter.best = getattr(counter, "best", None) or []
    counter.best.append(2)


def exchange_all(counter):
    counter.__dict__ = {"n": counter.n + 1}


def set_in_the_class(counter):
    type(counter).limit += 1


CHANGES_OF_AN_OBJECT = [
    set_an_attribute,
    add_an_attribute,
    delete_an_attribute,
    put_a_list,
    change_the_list,
    exchange_all,
    set_in_the_class,
]


@pytest.mark.parametrize("later", CHANGES_OF_AN_OBJECT)
@pytest.mark.parametrize("first", CHANGES_OF_AN_OBJECT)
def test_an_object_of_fixed_attributes_comes_back(first, later):
    Counter.limit = 3
    counter, still = Counter(), Counter()
    variables = Variables()
    variables.begin()
    taken = [variables.take()]
    first(counter)
    expected, limit = copy.deepcopy(vars(counter)), Counter.limit
    taken.append(variables.take())
    later(counter)
    variables.take()
    variables.put(taken[1])
    assert (vars(counter), Counter.limit) == (expected, limit)
    variables.put(taken[0])
    assert (vars(counter), Counter.limit) == (vars(Counter()), 3)
    assert vars(still) == vars(Counter())
