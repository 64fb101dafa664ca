"""A container with a part that no snapshot holds comes back whole in a survivor, and with a stand-in for the part in a replacement."""

import concurrent.futures
import io
import logging
import re
import sys
import threading
import types
import weakref

import pytest
from kit.taken import Taken
from test_made_in_loop import LIBRARY, Cache, Peekable, replacement, survivor

from deadpool_run.errors import RefusedError
from deadpool_run.worker.state.numbered import MadeLater
from deadpool_run.worker.variables.variables import Variables


def matches(_):
    return {"best": 0.5, "found": [re.match("(a)", "ab"), 7]}


class Slotted:
    __slots__ = ("__dict__", "__weakref__", "a")


class Bar:
    def __del__(self):
        pass


class Progress:
    """An object of the script's."""

    def __init__(self, of):
        self.of, self.count = of, 3


for each in (Slotted, Bar):
    each.__module__, LIBRARY.__dict__[each.__name__] = LIBRARY.__name__, each


@pytest.fixture(autouse=True)
def library(monkeypatch):
    monkeypatch.setitem(sys.modules, LIBRARY.__name__, LIBRARY)


def test_a_container_comes_back_with_a_stand_in_for_a_part_that_cannot():
    first, now = survivor(matches)
    assert now == first
    assert now["found"][0] is first["found"][0]
    _, now = replacement(matches)
    assert (now["best"], now["found"][1], len(now["found"])) == (0.5, 7, 2)
    with pytest.raises(
        RefusedError, match=r"an object of class re\.Match in .*Rank.loop.* is carried from step to step"
    ):
        now["found"][0].group()


PARTS = {
    "future": concurrent.futures.Future,
    "file": io.StringIO,
    "event": threading.Event,
    "object with slots of a library": Slotted,
    "iterator of a library": lambda: Peekable([1, 2, 3]),
    "iterator": lambda: map(str, [1, 2, 3]),
}


@pytest.mark.parametrize("put", [lambda part: [3, part], lambda part: {"n": 3, "part": part}, Progress])
@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_using_the_stand_in_is_refused(make, put):
    def part(of):
        return of[1] if isinstance(of, list) else of["part"] if isinstance(of, dict) else of.of

    def number(of):
        return of[0] if isinstance(of, list) else of["n"] if isinstance(of, dict) else of.count

    first, now = survivor(lambda _: put(make()))
    assert number(now) == 3
    assert part(now) is part(first) or make is PARTS["iterator of a library"]
    _, now = replacement(lambda _: put(make()))
    assert number(now) == 3
    with pytest.raises(RefusedError, match="only the code of its class"):
        next(part(now))


def test_a_survivor_has_no_iterator_that_the_interrupted_step_has_advanced():
    made = []

    def make(_):
        made.append(iter(map(str, [1, 2, 3])))
        if len(made) == 2:
            next(made[0])
        return {"batches": made[0], "n": 1}

    _, now = survivor(make)
    assert now["n"] == 1
    with pytest.raises(RefusedError, match=r"an object of class map in .*Rank.loop"):
        next(now["batches"])


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


def test_a_stand_in_is_no_weak_item():
    kept = threading.Event()
    _, now = replacement(lambda _: weakref.WeakValueDictionary(a=kept))
    with pytest.raises(RefusedError):
        len(now)


def test_an_inner_container_of_set_up_is_not_left_alone_for_one_part():
    """Its numbers come back although the loop has put a match beside them."""

    def run(taken=None):
        variables, state = Variables(), {"inner": {"best": 1.0}, "n": 0}
        variables.begin()
        if taken is None:
            state["inner"] |= {"best": 2.0, "match": re.match("a", "a")}
            kept = Taken([variables.take()])
            state["inner"]["best"] = 3.0
        variables.put(taken or kept[0])
        return state["inner"]["best"], taken or kept[0]

    best, taken = run()
    assert (best, run(taken)[0]) == (2.0, 2.0)


def test_a_logger_in_a_container_is_found_by_its_name():
    for process in (survivor, replacement):
        _, now = process(lambda _: {"log": logging.getLogger("a.b"), "n": 1})
        assert now == {"log": logging.getLogger("a.b"), "n": 1}


def test_parts_that_the_first_steps_make_have_names_inside_objects_too():
    def run(taken=None):
        variables, tracker = Variables(), None
        variables.begin()
        tracker = types.SimpleNamespace(now={"all": [Bar()]}, n=0)
        variables.rehearsed()
        if taken is None:
            tracker.n = 5
            return variables.take()
        variables.put(taken)
        return tracker.n, tracker.now["all"][0]

    number, bar = run(Taken([run()])[0])
    assert (number, type(bar)) == (5, Bar)


def test_parts_that_allow_weak_references_are_not_kept_alive():
    made, part = MadeLater(4, 2), Cache()
    number, reference = made.parts.number(part), weakref.ref(part)
    assert made.parts.get(number) is part
    del part
    assert reference() is None
    assert made.parts.get(number) is None
