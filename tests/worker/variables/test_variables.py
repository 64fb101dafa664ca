"""The script's variables come back as they were at a snapshot, in the same process and in a new one."""

import argparse
import collections
import dataclasses
import math
import random
import types
import weakref

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.worker.variables.values.objects import OpaqueError, UnkeptDataError
from deadpool_run.worker.variables.values.reader import ValueReader
from deadpool_run.worker.variables.values.writer import ValueWriter, encoded
from deadpool_run.worker.variables.variables import Variables

Pair = collections.namedtuple("Pair", "left right")  # noqa: PYI024 - as scripts do
COUNT = 0
SETTINGS = {"rate": 1.0, "model": torch.nn.Linear(1, 1)}


@dataclasses.dataclass
class Record:
    step: int
    losses: list


@dataclasses.dataclass(slots=True)
class Progress:
    step: int = 0
    best: float = 0.0


@dataclasses.dataclass(slots=True, frozen=True)
class Mark:
    step: int


class Hidden:
    __slots__ = ("__dict__", "__n", "__weakref__")

    def __init__(self):
        self.__n, self.also = 0, 0

    def bump(self):
        self.__n, self.also = self.__n + 1, self.also + 1
        return self.__n, self.also


class Tracker:
    made = 0

    def __init__(self):
        self.n, self.last, self.part, self.lock = 0, None, types.SimpleNamespace(k=1.0), object()


class Box(list):
    """A list that snapshots do not keep, because its class has slots."""

    __slots__ = ()


def counter():
    count = 0

    def bump():
        nonlocal count
        count += 1
        return count

    return bump


def script(variables, *, until, and_then, taken):
    """A loop of `until` steps, a snapshot in the empty box `taken`, and `and_then` steps; then its restore. Returns what is left.

    With a snapshot in the box, the loop is that of a replacement.
    """
    global COUNT, SETTINGS  # noqa: PLW0603 - as scripts do
    COUNT, Tracker.made = 0, 0
    SETTINGS = {"rate": 1.0, "model": SETTINGS["model"]}
    number, text, nothing, losses, history = 0, "", None, [], collections.deque(maxlen=3)
    alias = losses
    seen, words, by_name = set(), collections.Counter(), collections.defaultdict(list)
    average, array, scalar, count = torch.zeros(2), np.zeros(2), np.float32(0), np.zeros((), int)
    generators = random.Random(1), torch.Generator().manual_seed(2), np.random.default_rng(3), np.random.RandomState(4)
    tracker, trackers, arguments = Tracker(), [Tracker(), Tracker()], argparse.Namespace(lr=0.1)
    best, pair, records, huge, current, made = trackers[0], Pair(0, 0), [], 0, None, None
    bump = counter()
    queues, nested = [[], []], {"inner": {"rate": 1.0}}
    queue, inner, made_later, also = queues[0], nested["inner"], None, None
    progress, marks, hidden = Progress(), [], Hidden()
    variables.begin()
    for step in range(until + and_then):
        if step == until:
            taken.append(variables.take())
        progress.step += 1
        progress.best = 1 / (step + 1)
        marks.append(Mark(step))
        hidden.bump()
        number += 1
        text += "x"
        nothing = number if step % 2 else None
        losses.append(1 / (step + 1))
        history.append(losses[-3:])
        seen.add(step)
        words["x"] += 1
        by_name["a"].append(step)
        average = 0.9 * average + step
        array += step
        count[()] += step
        scalar = np.float32(scalar + step)
        drawn = [
            generators[0].random(),
            torch.rand(1, generator=generators[1]),
            generators[2].random(),
            generators[3].rand(),
        ]
        tracker.n += 1
        tracker.part.k *= 0.5
        tracker.last = drawn[0]
        trackers[step % 2].n += 1
        arguments.lr *= 0.9
        best, pair = trackers[step % 2], pair._replace(left=pair.left + 1)
        records = [*records, Record(step, [float(step)])][-2:]
        huge = 10 ** (19 + step)
        current = records[-1]
        made = types.SimpleNamespace(step=step)
        queue.append(step)
        inner["rate"] *= 0.5
        if step % 2 == 0:
            made_later = also = []
        made_later.append(step)
        bump()
        COUNT += 1
        Tracker.made += 1
        SETTINGS["rate"] *= 0.5
        SETTINGS[f"new {step}"] = step
    if taken:
        variables.put(taken[0])
    state = (
        number,
        text,
        nothing,
        list(losses),
        list(history),
        seen,
        dict(words),
        dict(by_name),
        average.tolist(),
        array.tolist(),
    )
    state += (
        scalar,
        type(scalar),
        count.tolist(),
        type(count),
        generators[0].random(),
        torch.rand(1, generator=generators[1]).item(),
    )
    state += (
        generators[2].random(),
        generators[3].rand(),
        vars(tracker.part),
        tracker.n,
        tracker.last,
        [each.n for each in trackers],
    )
    state += (vars(arguments), trackers.index(best), pair, records, huge, bump(), COUNT, Tracker.made)
    state += (SETTINGS["rate"], sorted(SETTINGS), isinstance(SETTINGS["model"], torch.nn.Linear), current, made)
    assert alias is losses
    assert queue is queues[0]
    assert inner is nested["inner"]
    assert also is made_later
    state += (queues, nested, also, progress, marks, hidden.bump())
    return state


@pytest.mark.parametrize("until", [0, 1, 5])
def test_steps_after_a_snapshot_are_undone(until):
    expected = script(Variables(), until=until, and_then=0, taken=Box())
    assert script(Variables(), until=until, and_then=3, taken=Box()) == expected


@pytest.mark.parametrize("rehearsed", [0, 2])
def test_another_process_gets_what_the_first_one_had(rehearsed):
    taken = Box()
    script(Variables(), until=5, and_then=1, taken=taken)
    replaced = script(Variables(), until=rehearsed, and_then=0, taken=taken)
    assert replaced == script(Variables(), until=5, and_then=0, taken=Box())


def test_what_cannot_be_kept_is_left_as_it_is():
    variables = Variables()
    model, other = torch.nn.Linear(1, 1), torch.nn.Linear(2, 2)
    model_now, grown = model, []
    variables.begin()
    taken = variables.take()
    model_now = other
    grown.extend(range(10_000))
    variables.put(taken)
    assert model_now is model
    assert grown == []


def test_a_list_that_outgrows_the_limit_is_named_once():
    variables, losses = Variables(), []
    variables.begin()
    for _ in range(3):
        losses.extend(range(100_000))
        variables.take()
    assert [name.rpartition(".")[2] for name in variables.too_large] == ["losses"]


def test_larger_tensors_are_found_wherever_they_are():
    class Average:
        def __init__(self):
            self.shadow = {"weight": torch.zeros(1 << 16), "bias": torch.zeros(2)}

    variables, average, many = Variables(), Average(), [torch.zeros(2048), torch.ones(3000, requires_grad=True)]
    variables.begin()
    found = {name.partition("()")[2]: tensor for name, tensor in variables.tensors()}
    shadow = next(tensor for name, tensor in found.items() if "shadow" in name and "weight" in name)
    assert shadow is average.shadow["weight"]
    assert [tensor for name, tensor in found.items() if "many" in name] == [many[0]]
    assert not [name for name in found if "bias" in name]


def test_a_protected_object_gets_its_numbers_back_and_its_data_is_left_to_it():
    protected, variables = Tracker(), Variables()
    protected.memory = [torch.zeros(2)]
    variables.begin([protected])
    taken = variables.take()
    protected.n = 5
    protected.memory.append(torch.ones(2))
    held = protected
    variables.put(taken)
    assert protected is held
    assert (protected.n, len(protected.memory)) == (0, 2)


def test_reading_variables_keeps_no_tensor_alive():
    variables = Variables()
    activation = torch.zeros(1 << 20)
    gone = weakref.ref(activation)
    variables.begin()
    variables.take()
    variables.put(variables.take())
    activation = None
    assert activation is None
    assert gone() is None


@pytest.mark.parametrize("name", ["\udcff.bin", "ö\ud800", "ö"])
def test_texts_come_back_also_names_of_files_that_are_not_utf_8(name):
    variables, names = Variables(), {name: [name]}
    variables.begin()
    taken = variables.take()
    names[name].append(name + "x")
    now = variables.take()
    variables.put(taken)
    assert names == {name: [name]}
    variables.put(now)
    assert names == {name: [name, name + "x"]}


def test_a_set_that_is_as_it_was_keeps_its_order():
    """The order also depends on the items that it once had."""
    variables, pending = Variables(), {16 * number for number in range(40)}
    variables.begin()
    pending.pop()
    taken, order = variables.take(), list(pending)
    variables.put(taken)
    assert list(pending) == order


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(max_size=3) | st.tuples(st.integers()), inner, max_size=3)
        | st.lists(inner, max_size=4).map(collections.deque)
        | st.frozensets(st.booleans(), max_size=2)
    ),
    max_leaves=20,
)


@given(plain)
def test_plain_values_survive(value):
    def written(each):
        return ValueWriter().write(each)

    node = msgspec.msgpack.decode(msgspec.msgpack.encode(written(value)))
    back = ValueReader().read(node)
    assert type(back) is type(value)
    assert encoded(written(back)) == encoded(node)


@pytest.mark.parametrize(("one", "other"), [(0.0, -0.0), (1, True), (1, 1.0), ([1], [1, 2]), (math.nan, 1.0)])
def test_values_differ_bit_for_bit(one, other):
    assert encoded(one) != encoded(other)
    assert encoded(one) == encoded(one)


@pytest.mark.parametrize("value", [iter(lambda: 1, 0), torch.zeros(65 << 20, dtype=torch.uint8), object()])
def test_opaque_values_are_refused(value):
    with pytest.raises(OpaqueError):
        ValueWriter().write([value])


def test_too_many_values_are_refused():
    with pytest.raises(UnkeptDataError, match="values"):
        ValueWriter().write([list(range(100))] * 100)
