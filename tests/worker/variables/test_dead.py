"""Dead variables, which running code assigns again before it reads them, are in no snapshot."""

import importlib
import sys
import weakref
from types import ModuleType

import pytest
import torch

from deadpool_run.errors import RefusedError
from deadpool_run.worker.variables.values.lost import LostValue
from deadpool_run.worker.variables.variables import Variables

BATCH = 100_000


class Box(list):
    """A list that snapshots do not keep, because its class has slots."""

    __slots__ = ("__weakref__",)


def a_batch(step):
    return torch.full((BATCH,), float(step))


# Not in functions that have an `assert`: pytest has those read their variables by name.


def train(look=lambda _: None, make=a_batch):
    """Run two steps, and restore the snapshot after the first one. `look` gets the function's frame. Return the snapshots."""
    variables, taken = Variables(), Box()
    average = 0.0
    variables.begin()

    def asked():
        for step in range(2):
            yield step
            taken.append(variables.take())
        variables.put(taken[0])

    for step in asked():
        batch = make(step)
        average += 1.0
        print(batch is None)
    look(sys._getframe())
    return taken, average


def test_a_batch_is_not_copied():
    taken, average = train()
    assert [each["large"] for each in taken] == [[], []]
    assert average == 1.0


def read_later():
    variables, taken, batch = Variables(), Box(), None
    variables.begin()

    def asked():
        yield 0
        taken.append(variables.take())

    for step in asked():
        print(batch)
        batch = a_batch(step)
    return taken


def test_a_batch_that_is_read_later_is_copied():
    assert len(read_later()[0]["large"]) == 1


@pytest.mark.parametrize(
    "make",
    [
        a_batch,
        lambda step: step,
        lambda step: [a_batch(step)],
        lambda step: {"inputs": a_batch(step), "step": step},
        lambda step: (a_batch(step), 1),
    ],
    ids=["tensor", "number", "list", "dict", "tuple"],
)
def test_who_reads_one_through_the_frame_is_refused(make):
    with pytest.raises(
        RefusedError, match=r"train\(\)\.batch is carried .*: the code that has it assigns it again before"
    ):
        train(lambda frame: bool(frame.f_locals["batch"]), make)


class Pool:
    """An object with which something ends when it is freed, such as threads."""


def test_an_object_that_only_a_dead_variable_keeps_alive_is_not_freed():
    pools = Box()

    def make(_):
        made = [Pool()]
        pools.append(weakref.ref(made[0]))
        return made

    train(lambda _: pools.append([each() is not None for each in pools]), make)
    assert pools[-1] == [False, True]


def test_one_that_a_weak_reference_sees_is_kept():
    seen = Box()

    def make(step):
        made = a_batch(step)
        seen.append(weakref.ref(made))
        return made

    taken, _ = train(make=make)
    assert [len(each["large"]) for each in taken] == [1, 1]


def try_out():
    variables, found = Variables(), Box()
    variables.begin()

    def asked():
        yield 0
        taken = variables.take()
        variables.trying = True
        variables.put(taken)
        variables.trying = False
        found.append(type(frame.f_locals["batch"]))
        variables.put_back()
        found.append(frame.f_locals["batch"])

    frame = sys._getframe()
    for step in asked():
        batch = step + 7
        print(batch)
    return found


MODULE = """
from loop_of_test import asked, read

kept = 0.0
for step in asked():
    batch = [float(step)] * 3
    kept += step + 1
    print(len(batch))
read(vars())
"""


@pytest.mark.parametrize("use", ["", "def report():\n    return batch\n"], ids=["dead", "read by a function"])
def test_variables_of_a_module_whose_code_has_the_loop(use, tmp_path, monkeypatch):
    variables, taken, seen = Variables(), Box(), Box()

    def asked():
        variables.begin()
        for step in range(2):
            yield step
            taken.append(variables.take())
        variables.put(taken[0])

    loop = ModuleType("loop_of_test")
    loop.asked, loop.read = asked, lambda found: seen.extend([found["kept"], found["batch"]])
    monkeypatch.setitem(sys.modules, loop.__name__, loop)
    path = tmp_path / f"looped_{len(use)}.py"
    path.write_text(use + MODULE.replace("vars()", "__import__('sys').modules[__name__].__dict__"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    importlib.import_module(path.stem)
    assert seen[0] == 1.0
    assert seen[1] == [0.0] * 3 if use else type(seen[1]) is LostValue


def test_values_come_back_after_the_trial():
    assert try_out() == [LostValue, 7]
