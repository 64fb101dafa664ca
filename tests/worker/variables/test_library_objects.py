"""Objects of libraries' classes come back, if they are nothing but values and references; others are left alone."""

import asyncio
import functools
import hashlib
import logging
import mmap
import os
import queue
import random
import re
import sqlite3
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from concurrent.futures import Future
from itertools import pairwise
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from kit.taken import Taken
from snapshot_kit import in_child
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from deadpool_run.worker.variables.variables import Variables


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


class Registering(type):
    """A metaclass, as libraries have that list their classes."""


class Augmentation(Averager, metaclass=Registering):
    """Has a table of its methods, and draws from a generator of its own, as the transforms of albumentations do."""

    def __init__(self, *inner):
        super().__init__(inner=list(inner), by_name={"image": self.__call__}, own=random.Random(3))

    def __call__(self):
        super().__call__()
        self.seen[-1] = self.own.randint(0, 1000)
        for each in self.inner:
            each()


Augmentation.__module__ = "of.a.library"


@pytest.mark.parametrize("rehearsed", [0, 2, 5])
def test_objects_with_a_metaclass_and_tables_of_their_methods_come_back(rehearsed):
    def augmented(steps):
        variables, outer = Variables(), Augmentation(Augmentation(), Augmentation())
        variables.begin()
        for _ in range(steps):
            outer()
        taken.append(variables.take())
        outer()
        variables.put(taken[0])
        outer()
        return [each.seen for each in (outer, *outer.inner)], outer.by_name["image"] == outer.__call__

    taken = Taken()
    drawn = random.Random(3)
    expected = [drawn.randint(0, 1000) for _ in range(4)]
    for steps in (3, rehearsed):
        assert augmented(steps) == ([expected] * 3, True)


def test_a_package_whose_name_begins_as_ours_is_a_library(monkeypatch):
    monkeypatch.setattr(OfLibrary, "__module__", "deadpool_runs.meters")
    assert run(Taken(), steps=3, where=as_variable) == (3, [6.0, 6.0], [1, 2, 3])


@pytest.mark.parametrize(
    "part",
    [
        queue.Queue(),
        iter("abc"),
        [queue.Queue()],
        threading.Condition(),
        {1: Averager()},
        deque([Averager()]),
        queue.Queue().get,
    ],
    ids=[
        "queue",
        "iterator",
        "list of queues",
        "condition",
        "dict by number",
        "objects in a deque",
        "method of a queue",
    ],
)
def test_it_is_left_alone_if_it_has_anything_else(part):
    assert run(Taken(), steps=3, where=as_variable, other=part)[0] == 4


def test_a_tree_of_settings_is_left_alone():
    settings = {f"part_{n}": [OfLibrary() for _ in range(100)] for n in range(3)}
    assert run(Taken(), steps=3, where=as_variable, **settings)[0] == 4


class Settings(OrderedDict):
    """Settings of a library, which are attributes, too, and do not change (diffusers)."""

    def __init__(self, **values):
        super().__init__(values)
        self.__dict__.update(values)

    def items(self):
        raise AssertionError("code of the class is run")

    values = __iter__ = items


class Pair(NamedTuple):
    one: int
    other: float


Settings.__module__ = Pair.__module__ = "of.a.library"
TABLES = {
    "settings": Settings(width=3, kinds=["a", "b"], inner={"depth": 2}),
    "a dict with defaults": defaultdict(dict, {"a": {"b": 1}}),
    "a named tuple": Pair(1, 0.5),
    "an array of objects": np.array([[1], {"a": None}], dtype=object),
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
@pytest.mark.parametrize("rehearsed", [0, 5])
def test_its_values_come_back_beside_a_table_of_settings(table, rehearsed):
    taken, expected = Taken(), (3, [6.0, 6.0], [1, 2, 3])
    assert run(taken, steps=3, where=as_variable, table=table) == expected
    assert run(taken, steps=rehearsed, where=as_variable, table=table) == expected


def test_a_table_with_anything_else_is_left_alone():
    lists = np.array([[iter("abc")], []], dtype=object)
    for table in (Settings(queue=queue.Queue()), defaultdict(list, {"a": [iter("abc")]}), lists):
        assert run(Taken(), steps=3, where=as_variable, table=table)[0] == 4


class Sorted:
    """A container of lists that its class makes in `__new__`, as sortedcontainers does."""

    def __new__(cls):
        made = super().__new__(cls)
        made.lists, made.most = [], []
        return made

    def __reduce__(self):
        return Sorted, ()

    def add(self, value):
        self.lists.append([value])
        self.most.append(value)


Sorted.__module__ = "of.a.library"


@pytest.mark.parametrize("rehearsed", [0, 3])
def test_an_object_that_its_class_makes_in_a_way_of_its_own_comes_back(rehearsed):
    taken = Taken()
    for steps in (3, rehearsed):
        variables, found = Variables(), Sorted()
        variables.begin()
        for step in range(steps):
            found.add(step)
        taken.append(variables.take())
        found.add(9)
        variables.put(taken[0])
        assert (found.lists, found.most) == ([[0], [1], [2]], [0, 1, 2])


class Environment:
    """A simulation with arrays and generators, as those of gymnasium, that refers weakly to a model."""

    def __init__(self, model):
        self.model = weakref.ref(model)
        self.space = OfLibrary(low=np.zeros(3), kind=np.dtype("float32"), size=np.int64(3))
        self.position, self.count, self.random = np.zeros(4), np.int64(0), np.random.default_rng(1)
        self.others = [np.random.RandomState(2), random.Random(3), torch.Generator().manual_seed(4)]
        self.noise = None

    def __call__(self):
        legacy, plain, of_torch = self.others
        self.position += self.random.random(4)
        self.count += 1
        self.noise = legacy.rand(), plain.random(), torch.rand(1, generator=of_torch).item()

    def state(self):
        return self.position.tolist(), int(self.count), self.noise


Environment.__module__ = "of.a.library"


@pytest.mark.parametrize("rehearsed", [0, 2])
def test_arrays_and_generators_come_back(rehearsed):
    model, taken, results = nn.Linear(2, 2), Taken(), []
    for steps in (3, rehearsed):
        variables, environment = Variables(), Environment(model)
        variables.begin()
        for _ in range(steps):
            environment()
        taken.append(variables.take())
        before = environment.state()
        environment()
        variables.put(taken[0])
        results += [before] if steps == 3 else []
        results.append(environment.state())
        environment()
        results.append(environment.state())
        assert environment.model() is model
    assert results[0] == results[1] == results[3]
    assert results[2] == results[4]


@pytest.mark.parametrize("part", [np.array([object()]), np.rec.array([(1,)])], ids=["objects", "records"])
def test_it_is_left_alone_with_arrays_of_other_kinds(part):
    assert run(Taken(), steps=3, where=as_variable, other=part)[0] == 4


class Meters(Averager):
    """Objects in objects, also in a circle, beside a lock and a log."""

    def __init__(self):
        super().__init__(lock=threading.Lock(), log=logging.getLogger("meters"))
        self.by_name, self.list, self.inner = {"a": OfLibrary()}, [OfLibrary(), {"n": 0}], OfLibrary(outer=None)
        self.inner.outer, self.inner.inner = self, OfLibrary()

    def __call__(self):
        super().__call__()
        for each in (self.by_name["a"], self.list[0], self.inner, self.inner.inner):
            each()
        self.list[1]["n"] += 1

    def counts(self):
        return (
            self.step,
            self.by_name["a"].step,
            self.list[0].step,
            self.list[1]["n"],
            self.inner.step,
            self.inner.inner.step,
        )


Meters.__module__ = "of.a.library"


@pytest.mark.parametrize("rehearsed", [0, 3])
def test_objects_inside_it_come_back(rehearsed):
    taken = Taken()
    for steps in (3, rehearsed):
        variables, meters = Variables(), Meters()
        inside = meters.inner
        variables.begin()
        for _ in range(steps):
            meters()
        taken.append(variables.take())
        meters()
        variables.put(taken[0])
        assert meters.counts() == (3,) * 6
        assert meters.inner is inside
        assert inside.outer is meters


def hashed(_path):
    found = hashlib.sha256()
    return found, lambda: found.update(b"x")


def in_a_database(_path):
    found = sqlite3.connect(":memory:")
    found.execute("create table seen(number)")
    return found, lambda: found.execute("insert into seen values (1)")


def in_a_file(path):
    found = path.open("w+b")
    return found, lambda: found.write(b"x")


def in_memory(_path):
    found = memoryview(bytearray(8))

    def count():
        found[0] += 1

    return found, count


def in_a_mapping(_path):
    found = mmap.mmap(-1, 4096)

    def count():
        found[0] += 1

    return found, count


@pytest.mark.parametrize("make", [hashed, in_a_database, in_a_file, in_memory, in_a_mapping])
def test_an_object_in_c_that_has_changed_is_named(make, tmp_path):
    taken, named = Taken(), []
    for steps in (3, 0):
        variables, (carried, change) = Variables(), make(tmp_path / f"file {steps}")
        variables.begin()
        for _ in range(steps):
            change()
        taken.append(variables.take())
        variables.put(taken[0])
        named.append([name.rpartition(".")[2] for name in variables.left_alone])
        if hasattr(carried, "close"):
            carried.close()
    assert named[0] == []
    assert "carried" in named[1]


def closed(path):
    with path.open("w") as file:
        return file


MADE_LATE = {
    "a future": (lambda _: Future(), True),
    "a task of the loop": (lambda _: asyncio.Future(loop=asyncio.new_event_loop()), True),
    "a closed file": (closed, False),
    "a number": (lambda _: 5, False),
}


@pytest.mark.parametrize("has_one", [False, True])
@pytest.mark.parametrize(("make", "is_named"), MADE_LATE.values(), ids=MADE_LATE)
def test_an_object_that_the_loop_has_made_is_named_unless_the_new_process_has_one_of_its_class(
    make, is_named, has_one, tmp_path
):
    taken, found = Taken(), []
    for is_replacement in (False, True):
        variables, held = Variables(), None
        variables.begin()
        if has_one or not is_replacement:
            held = make(tmp_path / "file")
        taken.append(variables.take())
        variables.put(taken[0])
        found = variables.left_alone
        if isinstance(held, asyncio.Future):
            held.get_loop().close()
    assert [name.rpartition(".")[2] for name in found] == (["held"] if is_named and not has_one else [])


def test_an_object_of_one_slot_is_left_alone():
    kind = type("Slot", (), {"__slots__": ("n",), "__module__": "of.a.library"})
    variables, slot = Variables(), kind()
    slot.n = 1
    variables.begin()
    taken = variables.take()
    slot.n = 2
    variables.put(taken)
    assert slot.n == 2


def test_the_environment_is_left_alone(monkeypatch):
    monkeypatch.setattr(os.environ, "_data", {b"A": b"1"})  # few, as in a container
    variables, environment = Variables(), os.environ
    variables.begin()
    taken = variables.take()
    environment["A"] = "2"
    variables.put(taken)
    assert os.environ["A"] == "2"


class Register(dict):
    """A container of a library, with an attribute and a file."""

    def __init__(self):
        super().__init__({0: sys.stderr})
        self.calls = 0

    def add(self):
        self.calls += 1
        self["n"] = self.calls // 2


class Bar:
    """A progress bar, with a file."""

    def __init__(self):
        self.n, self.file = 0, sys.stderr

    def add(self):
        self.n += 1


Register.__module__ = Bar.__module__ = "of.a.library"


@pytest.mark.parametrize("kind", [Register, Bar])
def test_a_restore_says_which_objects_are_not_as_in_the_process_of_the_snapshot(kind):
    taken = Taken()
    for steps, expected in ((3, []), (2, ["seen"]), (0, ["seen"])):
        variables, seen = Variables(), kind()
        variables.begin()
        for _ in range(steps):
            seen.add()
        taken.append(variables.take())
        variables.trying = True
        variables.put(taken[0])
        assert variables.left_alone == []
        variables.trying = False
        variables.put(taken[0])
        assert [name.rpartition(".")[2] for name in variables.left_alone] == expected


class Owner:
    """An object of the script's with a part that no snapshot holds."""

    def __init__(self, part):
        self.part = part


@pytest.mark.parametrize("make", [lambda part: {"n": 1, "part": part}, lambda part: [part], Owner])
def test_a_restore_names_what_the_loop_has_made_around_a_part_that_no_snapshot_holds(make):
    def run(taken=None):
        made, plain = [], [1, 2]
        variables = Variables()
        variables.begin()
        if taken is None:
            made = make(re.match("a", "ab"))
            plain.append(3)
            return made, variables.take()
        variables.trying = True
        variables.put(taken)
        assert variables.left_alone == []
        variables.trying = False
        variables.put(taken)
        assert plain == [1, 2, 3]
        return [name.rpartition(".")[2] for name in variables.left_alone], None

    _, taken = run()
    assert run(taken)[0] == ["made"]


def fill_queues(taken=None):
    """Put and get in two steps. Return the snapshot between them, what is in the queues after its restore, and those left alone."""
    variables, filled, other = Variables(), queue.Queue(8), [queue.PriorityQueue(), queue.LifoQueue()]
    filled.put(0)
    variables.begin()
    for step in (1, 2) if taken is None else ():
        filled.put([step])
        filled.get()
        other[0].put(-step)
        other[1].put(step)
        taken = taken or variables.take()
    queues = filled, *other
    variables.put(taken)
    found = [list(each.queue) for each in queues], [each.unfinished_tasks for each in queues]
    assert (filled, *other) == queues
    return taken, found, [name.rpartition(".")[2] for name in variables.left_alone]


@pytest.mark.usefixtures("_warm")
def test_queues_that_no_other_thread_uses_come_back():
    expected = ([[[1]], [-1], [1]], [2, 1, 1]), []
    taken, *found = in_child(fill_queues)
    assert tuple(found) == expected
    assert tuple(in_child(fill_queues, taken)[1:]) == expected


def fill_queues_beside_a_thread(taken=None):
    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    thread.start()
    try:
        return fill_queues(taken)
    finally:
        end.set()
        thread.join()


@pytest.mark.usefixtures("_warm")
def test_a_queue_that_the_loop_fills_beside_a_thread_is_named():
    taken, *_ = in_child(fill_queues_beside_a_thread)
    assert "filled" in in_child(fill_queues_beside_a_thread, taken)[2]


def test_a_cache_of_results_that_the_loop_fills_is_named():
    """A replacement computes them again. If they depend on more than the arguments, they may differ."""

    def run(taken=None):
        seen, same = (functools.lru_cache(make) for make in ([].append, str))
        same(1)
        variables = Variables()
        variables.begin()
        same(1)
        if taken is None:
            seen(1)
            return variables.take()
        variables.put(taken)
        return [name.rpartition(".")[2] for name in variables.left_alone]

    assert run(run()) == ["seen"]


def test_objects_that_training_does_not_change_are_not_named():
    variables, seen = Variables(), Bar()
    variables.begin()
    taken = variables.take()
    seen.add()
    variables.put(taken)
    assert variables.left_alone == []


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(TensorDataset(torch.ones(4)), 2, shuffle=True),
        lambda: logging.getLogger("left alone"),
    ],
    ids=["loader", "logger"],
)
def test_loaders_and_loggers_are_left_alone(make):
    variables, other = Variables(), make()
    variables.begin()
    taken = variables.take()
    other.mark = 1
    variables.put(taken)
    assert other.mark == 1
    assert not variables.keeps(other)


class Slotted:
    """Has no table of attributes, as classes in C and those of xarray do not."""

    __slots__ = ("rows",)


class Left(Bar):
    """An object that snapshots leave alone, because it has a file, with parts of many kinds inside."""

    def __init__(self):
        super().__init__()
        self.inside = {"list": [{"n": 0}], "deque": deque([Averager()]), "text": "a" * 5000, "model": nn.Linear(1, 1)}
        self.array, self.drawn = np.zeros((3, 3)), (random.Random(1), np.random.default_rng(1))
        self.items, self.itself, self.slotted = (n for n in [1, 2, 3]), self, Slotted()
        self.slotted.rows, self.objects = [np.zeros(2)], np.array([[1], None], dtype=object)


Left.__module__ = Slotted.__module__ = "of.a.library"


def add_to_a_dict(left):
    left.inside["list"][0]["n"] += 1


def count_in_a_deque(left):
    left.inside["deque"][0].step += 1


def lengthen_a_text(left):
    left.inside["text"] += "a"


def write_to_a_parameter(left):
    with torch.no_grad():
        left.inside["model"].weight.add_(1)


def write_to_an_array(left):
    left.array[2, 2] = 1


def draw(left):
    left.drawn[1].random()


def go_on(left):
    next(left.items)


def add_to_a_slot(left):
    left.slotted.rows.append(np.zeros(2))


def add_to_an_array_of_objects(left):
    left.objects[0].append(2)


@pytest.mark.parametrize(
    "change",
    [
        add_to_a_dict,
        count_in_a_deque,
        lengthen_a_text,
        write_to_a_parameter,
        write_to_an_array,
        draw,
        go_on,
        add_to_a_slot,
        add_to_an_array_of_objects,
    ],
)
def test_a_change_inside_an_object_that_is_left_alone_is_seen(change):
    variables, left, other = Variables(), Left(), Left()
    kept = [1, 2]
    variables.begin()
    digests = [variables.left_out(), variables.left_out()]
    kept.append(3)
    change(left)
    digests.append(variables.left_out())
    changed = [
        [name.rpartition(".")[2] for name in after if before.get(name) != after[name]]
        for before, after in pairwise(digests)
    ]
    assert changed == [[], ["left (Left)"]]
    assert other.n == 0


def test_what_a_snapshot_has_does_not_count_inside_an_object_that_is_left_alone():
    variables, left, model = Variables(), Left(), nn.Linear(1, 1)
    left.inside.update(model=model, weight=model.weight, variables=variables)
    variables.begin([model], [("model", model), ("model/weight", model.weight)])
    before = variables.left_out()
    write_to_a_parameter(left)
    variables.take()
    after = variables.left_out()
    assert after == before
