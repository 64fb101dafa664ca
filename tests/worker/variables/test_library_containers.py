"""Containers that libraries derive from Python's come back, also if set-up has made them; others are left alone."""

import sys
from collections import OrderedDict, defaultdict, deque
from types import ModuleType

import pytest
from kit.taken import Taken

from deadpool_run.worker.variables.left_alone import fingerprint_of
from deadpool_run.worker.variables.variables import Variables


class WithMethods(dict):
    """Its methods convert what they are given, and no snapshot may call them."""

    def __setitem__(self, key, value):
        raise AssertionError("code of the class is run")

    __iter__ = items = values = keys = update = clear = __setitem__


class WithAttributes(dict):
    """Items are attributes, too (EasyDict)."""

    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name, value):
        value = WithAttributes(value) if type(value) is dict else value
        super().__setitem__(name, value)
        super().__setattr__(name, value)


class WithProperty(dict):
    """A property is in the place of its table of attributes (Munch)."""

    @property
    def __dict__(self):
        return dict(self)


class WithMaker(dict):
    """Its class makes it in a way of its own (Box, boltons' dicts)."""

    def __new__(cls, *_):
        made = super().__new__(cls)
        made.options = {"depth": 0}
        return made


class WithCount(defaultdict):
    def __new__(cls, *_):
        made = super().__new__(cls)
        made.count = [0]
        return made

    def __init__(self, values):
        super().__init__(int, values)


class Rows(list):
    pass


class Last(deque):
    def __init__(self, values):
        super().__init__(values, 4)


class Names(set):
    pass


DICTS = (WithMethods, WithAttributes, WithProperty, WithMaker, WithCount)
OTHERS = (Rows, Last, Names)


class Meter:
    """An object of the script's."""

    def __init__(self):
        self.count = 0


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The containers are a library's, which every process has imported."""
    module = ModuleType("of_a_library")
    for kind in (*DICTS, *OTHERS):
        monkeypatch.setattr(kind, "__module__", module.__name__)
        setattr(module, kind.__name__, kind)
    monkeypatch.setitem(sys.modules, module.__name__, module)


def after_two(made, change, shown):
    """Change twice, take a snapshot, change once more, and put back; then put into a new process. Returns what both have."""
    taken, found = Taken(), []
    for steps in (2, 0, 3):
        variables, box = Variables(), made()
        variables.begin()
        for step in range(steps):
            change(box, step)
        taken.append(variables.take())
        change(box, 9)
        variables.put(taken[0])
        found.append(shown(box))
    return found


@pytest.mark.parametrize("kind", DICTS)
@pytest.mark.parametrize("of", [str, lambda key: (key, 1)], ids=["by names", "by other keys"])
def test_a_dict_comes_back(kind, of):
    def made():
        outer, inner = kind({}), kind({})
        dict.update(inner, {"rows": []})
        dict.update(outer, {of("n"): 0, of("inner"): inner})
        return outer

    def change(box, step):
        dict.update(box, {of("n"): dict.get(box, of("n")) + 1, of(f"new {step}"): [step]})
        dict.get(dict.get(box, of("inner")), "rows").append(step)

    def shown(box):
        inner = dict.get(box, of("inner"))
        return dict(dict.items(box)) | {of("inner"): (type(inner), dict(dict.items(inner)))}

    expected = {of("n"): 2, of("inner"): (kind, {"rows": [0, 1]}), of("new 0"): [0], of("new 1"): [1]}
    assert after_two(made, change, shown) == [expected] * 3


def test_attributes_that_are_items_too_come_back():
    def change(box, step):
        box["n"], box.inner["n"], box[f"new {step}"] = box.n + 1, box.inner.n + 1, {"step": step}

    def shown(box):
        return box, box.n, box.inner is box["inner"], box.inner.n, [getattr(box, f"new {step}").step for step in (0, 1)]

    found = after_two(lambda: WithAttributes({"n": 0, "inner": {"n": 5}}), change, shown)
    box = {"n": 2, "inner": {"n": 7}, "new 0": {"step": 0}, "new 1": {"step": 1}}
    assert found == [(box, 2, True, 7, [0, 1])] * 3


def set_an_option(box, step):
    box.options["depth"] += 1
    box.options[step] = step


def append_a_count(box, step):
    box.count.append(step)


@pytest.mark.parametrize(
    ("kind", "change", "expected"),
    [
        (WithMaker, set_an_option, {"options": {"depth": 2, 0: 0, 1: 1}}),
        (WithCount, append_a_count, {"count": [0, 0, 1]}),
    ],
)
def test_attributes_beside_the_items_come_back(kind, change, expected):
    assert after_two(lambda: kind({}), change, vars) == [expected] * 3


@pytest.mark.parametrize("kind", OTHERS)
def test_other_containers_come_back(kind):
    def change(box, step):
        (box.add if kind is Names else box.append)(f"of step {step}")

    found = after_two(lambda: kind(["first"]), change, list)
    assert [sorted(each) for each in found] == [["first", "of step 0", "of step 1"]] * 3


@pytest.mark.parametrize("inside", [Meter, lambda: [Meter()], lambda: {1: Meter()}])
@pytest.mark.parametrize("kind", [*DICTS, OrderedDict, lambda _: defaultdict(list)])
def test_an_object_of_the_scripts_in_a_dict_comes_back_beside_other_parts(kind, inside):
    def made():
        box = kind({})
        base = OrderedDict if kind is OrderedDict else dict
        base.update(box, {"log": Taken(), "it": inside()})
        return box

    def meter_in(box):
        found = dict.get(box, "it")
        return found if type(found) is Meter else found[1] if type(found) is dict else found[0]

    def change(box, _):
        meter_in(box).count += 1

    assert after_two(made, change, lambda box: meter_in(box).count) == [2] * 3


@pytest.mark.parametrize("kind", OTHERS)
def test_a_container_that_has_anything_else_is_left_alone(kind):
    """It is a registry of a library's, say, with what each process has of its own."""
    opened = object()
    found = after_two(lambda: kind([opened]), lambda box, step: (box.add if kind is Names else box.append)(step), len)
    assert found == [4, 2, 5] if kind is not Last else found == [4, 2, 4]


def test_names_of_attributes_may_be_numbers():
    """The user learns of such an object after the trial."""
    found = Meter()
    vars(found).update({1: 2, "a": 3})
    assert fingerprint_of(found)
    box = WithProperty({1: [Taken()], "a": 0})
    assert fingerprint_of(box)
