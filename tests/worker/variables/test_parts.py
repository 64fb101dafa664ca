"""Values beside others that cannot be kept, in cycles, and in shared memory come back; so do tensors of unusual kinds."""

import collections
import dataclasses
import re
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from kit.taken import Taken
from test_kinds import run

from deadpool_run.worker.variables.variables import Variables

STEPS = 4


def closure():
    count = 0

    def bump():
        nonlocal count
        count += 1
        return count

    return bump


class Task:
    def __init__(self):
        self.loss, self.calls = torch.nn.MSELoss(), 0


@dataclasses.dataclass
class Guarded:
    lock: object = dataclasses.field(default_factory=threading.Lock)
    count: int = 0


class Node:
    def __init__(self, value, parent=None):
        self.value, self.parent, self.children = value, parent, []


class Progress(msgspec.Struct):
    step: int
    best: float = 0.0


class Alone:
    """The only object of its class."""

    it = None

    def __new__(cls):
        if cls.it is None:
            cls.it = super().__new__(cls)
            cls.it.calls = 0
        return cls.it


def alone():
    Alone.it = None

    def bump():
        Alone().calls += 1
        return Alone().calls, Alone() is Alone.it

    return bump


def array_of_objects():
    parts = np.array([1, "a", None, {"n": 0}], dtype=object).reshape(2, 2)

    def bump():
        parts[0, 0] += 1
        parts[1, 1]["n"] += 2
        parts[1, 0] = parts[0, 0] / 2
        return parts.tolist()[0], parts[1, 1]["n"], parts[1, 0]

    return bump


def local_class():
    @dataclasses.dataclass(frozen=True)
    class State:
        seen: int = 0
        last: tuple = ()

    state = State()

    def bump():
        nonlocal state
        state = dataclasses.replace(state, seen=state.seen + 1, last=(*state.last, state.seen))
        return dataclasses.astuple(state), isinstance(state, State)

    return bump


def dicts_with_modules():
    terms = [{"loss": torch.nn.MSELoss(), "weight": 1.0, "tags": ("a", torch.nn.L1Loss())} for _ in range(3)]

    def bump():
        terms[1]["weight"] *= 0.5
        terms.append(terms.pop(0))
        return [term["weight"] for term in terms], [isinstance(term["loss"], torch.nn.MSELoss) for term in terms]

    return bump


def tasks_by_number():
    tasks = {number: Task() for number in range(300)}

    def bump():
        tasks[7].calls += 1
        return tasks[7].calls, float(tasks[7].loss(torch.ones(1), torch.zeros(1)))

    return bump


def closures_in_a_list():
    hooks = [closure(), {"nested": closure()}]

    def bump():
        return hooks[0](), hooks[1]["nested"](), hooks[1]["nested"]()

    return bump


def guarded_later():
    recent = collections.deque(maxlen=3)

    def bump():
        recent.append(Guarded(count=len(recent) + (recent[-1].count if recent else 0)))
        with recent[-1].lock:
            return [each.count for each in recent]

    return bump


def tree():
    root = Node(0)

    def bump():
        leaf = root
        while leaf.children:
            leaf = leaf.children[-1]
        leaf.children.append(Node(leaf.value + 1, leaf))
        return leaf.children[-1].value, leaf.children[-1].parent is leaf, root.parent

    return bump


def ring():
    one, other = Node(1), Node(2)
    one.parent, other.parent = other, one
    at = {"now": one, "all": []}
    at["all"].append(at)

    def bump():
        at["now"].value += 10
        at["now"] = at["now"].parent
        return at["now"].value, at["all"][0] is at, at["now"].parent.parent is at["now"]

    return bump


def chain():
    first = Node(0)
    for number in range(40):
        first = Node(number, first)

    def bump():
        nonlocal first
        first.parent.value += 1
        first = Node(first.value + 1, first)
        return first.value, first.parent.parent.value

    return bump


def view_of_a_buffer():
    buffer, filled = torch.zeros(8, 4), 0
    row = buffer[0]

    def bump():
        nonlocal filled, row
        row[filled % 4] = filled + 1.0
        filled += 1
        if filled % 2 == 0:
            row = buffer[filled % 8]
        return float(buffer.sum()), row.tolist()

    return bump


def view_of_a_later_buffer():
    state = {}

    def bump():
        if not state:
            state["buffer"] = torch.zeros(8, 4)
            state["row"] = state["buffer"][2, 1:]
        state["row"] += 1
        return float(state["buffer"].sum()), state["row"].tolist()

    return bump


def view_of_an_array():
    buffer, filled = np.zeros((8, 4)), 0
    row = buffer[0, ::2]

    def bump():
        nonlocal filled, row
        row[filled % 2] = filled + 1.0
        filled += 1
        row = buffer[filled % 8, ::2]
        row += 0.5
        return float(buffer.sum()), row.tolist()

    return bump


def tensor_of_an_array():
    """Both have the same memory, and count their steps in other units."""
    array, row = np.arange(12.0).reshape(3, 4), None

    def bump():
        nonlocal row
        before = None if row is None else row.tolist()
        row = torch.from_numpy(array * 2)[1:, ::2] if row is None else torch.from_numpy(array)[1:, ::2]
        array[0, 0] += 1
        return before, array.tolist()

    return bump


def unusual_tensors():
    wide, best = torch.zeros(1).expand(3), None
    with torch.inference_mode():
        frozen = torch.zeros(2)
    word, progress = np.str_("a"), Progress(0)

    def bump():
        nonlocal wide, best, frozen, word
        wide, word = (wide[:1] + 1).expand(3), np.str_(word + "b")
        best = torch.arange(progress.step + 3.0).topk(2)
        with torch.inference_mode():
            frozen = frozen + 1
        progress.step += 1
        progress.best = float(best.values[0])
        return wide.tolist(), best.values.tolist(), best.indices.tolist(), frozen.tolist(), str(word), progress.best

    return bump


def parameter():
    weight = torch.nn.Parameter(torch.ones(2))

    def bump():
        (weight**2).sum().backward()
        with torch.no_grad():
            weight.sub_(0.1 * weight.grad)
        return weight.tolist(), weight.grad.tolist(), type(weight) is torch.nn.Parameter

    return bump


KINDS = [
    *(dicts_with_modules, tasks_by_number, closures_in_a_list, guarded_later, tree, ring, chain),
    *(alone, array_of_objects, local_class),
    *(view_of_a_buffer, view_of_a_later_buffer, view_of_an_array, tensor_of_an_array, unusual_tensors, parameter),
]


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("until", [0, 1, STEPS])
def test_a_survivor_repeats_with_what_it_had(make, until):
    expected = run(make, Taken(), until=until)
    assert run(make, Taken(), until=until, and_then=1) == expected


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("rehearsed", [0, 2, STEPS + 1])
def test_a_replacement_goes_on_with_what_the_lost_rank_had(make, rehearsed):
    taken = Taken()
    expected = run(make, taken, until=STEPS)
    assert run(make, taken, until=rehearsed) == expected


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_the_results_are_those_without_a_restore(make):
    bump = make()
    for _ in range(STEPS):
        bump()
    expected = bump(), bump()
    assert run(make, Taken(), until=STEPS) == expected


def unkept(kind):
    """A new object that no snapshot holds."""
    return {
        "file": lambda: Path("/dev/null").open(),
        "box": Taken,
        "function": lambda: lambda: 0,
        "match": lambda: re.match("a", "a"),
    }[kind]()


@pytest.mark.parametrize("count", range(1, 5))
@pytest.mark.parametrize("kind", ["file", "box", "function", "match"])
def test_a_change_beside_several_parts_that_cannot_be_kept_comes_back(kind, count):
    def loop(taken, *, steps):
        parts, variables = [*(unkept(kind) for _ in range(count)), 0], Variables()
        first = Taken(parts[:count])
        variables.begin()
        if steps:
            parts[-1] = 5
            parts[0], parts[count - 1] = parts[count - 1], parts[0]
        taken.append(variables.take())
        if not steps:
            variables.put(taken[0])
        return [first.index(each) for each in parts[:count]], parts[-1], variables.left_alone

    taken = Taken()
    assert loop(taken, steps=1) == loop(taken, steps=0)


@pytest.mark.parametrize("kind", ["file", "box", "match"])
def test_a_container_of_set_up_is_named_if_the_loop_puts_such_a_part_into_it(kind):
    def loop(taken, *, steps):
        parts, variables = [unkept(kind), unkept(kind), 0], Variables()
        variables.begin()
        if steps:
            parts[0], parts[2] = unkept(kind), 5
        taken.append(variables.take())
        if not steps:
            variables.put(taken[0])
        return [name.rpartition(".")[2] for name in variables.left_alone], len(parts)

    taken = Taken()
    assert (loop(taken, steps=1), loop(taken, steps=0)) == (([], 3), (["parts"], 3))
