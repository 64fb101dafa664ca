"""Tensors and arrays that begin to share memory in the loop share it after a restore, or their use is refused."""

import numpy as np
import pytest
import torch

from deadpool_run.errors import RefusedError
from deadpool_run.vault.segments import SlotRole
from deadpool_run.worker.state.optimizers import Tracked
from deadpool_run.worker.state.state_tensors import StateTensors
from deadpool_run.worker.variables.values.lost import MOVED, OVERLAPS, LostValue
from deadpool_run.worker.variables.values.views import covers
from deadpool_run.worker.variables.variables import Variables

LARGE = 100_000


class Box(list):
    """A list that snapshots do not keep, because its class has slots."""

    __slots__ = ()


def slices(size):
    whole = torch.arange(float(size))
    return whole[1 : size - 1], whole[size // 2 :]


def slices_of_an_array(size):
    whole = np.arange(float(size))
    return whole[1 : size - 1], whole[size // 2 :]


def transposed(size):
    whole = torch.arange(float(2 * size)).reshape(2, size).detach()
    return whole.t(), whole.t().t()


def tensor_over_array(size):
    array = np.arange(float(size))
    return array, torch.from_numpy(array)


def array_over_tensor(size):
    tensor = torch.arange(float(size))
    return tensor.numpy(), tensor


def swapped(make):
    return lambda size: make(size)[::-1]


PAIRS = [slices, slices_of_an_array, transposed, tensor_over_array, array_over_tensor]


@pytest.mark.parametrize("make", [*PAIRS, *map(swapped, PAIRS)])
@pytest.mark.parametrize("size", [10, LARGE])
def test_views_that_were_made_in_the_loop_share_memory_after_a_restore(make, size):
    def loop(taken, *, steps):
        one, other, variables = None, None, Variables()
        variables.begin()
        if steps:
            one, other = make(size)
        taken.append(variables.take())
        variables.put(taken[0])
        before = [each.tolist() for each in (one, other)]
        one[...] = -1
        return *before, one.tolist(), other.tolist()

    taken = Box()
    first = loop(taken, steps=1)
    assert first[1] != first[3]
    assert loop(taken, steps=0) == first


def small_parts(whole, *, overlap):
    return whole[:10], whole[9 if overlap else 10 : 30]


def small_columns(whole, *, overlap):
    rows = whole[:1000].view(10, 100)
    return rows[:, :10], rows[:, 9 if overlap else 10 : 20]


@pytest.mark.parametrize("make", [small_parts, small_columns])
@pytest.mark.parametrize("whole", [torch.zeros, np.zeros])
def test_small_parts_of_large_memory_may_not_overlap(make, whole):
    if (make, whole) == (small_columns, np.zeros):
        make = small_parts

    def loop(taken, *, steps, overlap):
        one, other, variables = None, None, Variables()
        variables.begin()
        if steps:
            one, other = make(whole(LARGE), overlap=overlap)
        taken.append(variables.take())
        variables.put(taken[0])
        return one, other

    for overlap in (False, True):
        taken = Box()
        loop(taken, steps=1, overlap=overlap)
        one, other = loop(taken, steps=0, overlap=overlap)
        assert (len(one), type(other) is LostValue) == (10, overlap)
    with pytest.raises(RefusedError, match=OVERLAPS):
        other + 1


def test_a_survivor_and_the_trial_lose_an_overlapping_part():
    for trying in (False, True):
        one, other, variables = None, None, Variables()
        variables.begin()
        one, other = small_parts(torch.zeros(LARGE), overlap=True)
        taken = variables.take()
        variables.trying = trying
        variables.put(taken)
        variables.put_back()
        assert (len(one), type(other)) == (10, LostValue)


def moved(weight, *, by_array=False):
    flat = torch.zeros(6)
    weight.data = flat[2:].view(2, 2)
    return flat.numpy() if by_array else flat


@pytest.mark.parametrize(
    "make", [moved, lambda weight: moved(weight, by_array=True), lambda weight: weight.detach().numpy()]
)
def test_memory_that_is_shared_with_a_parameter_in_the_loop_is_refused(make):
    """As of `vector_to_parameters()`: after a restore, writes to the vector would no longer change the parameters."""

    def loop(taken, *, steps):
        weight, flat, variables = torch.nn.Parameter(torch.ones(2, 2)), None, Variables()
        variables.begin(parts=[("weight", weight)], others=[weight])
        if steps:
            flat = make(weight)
        taken.append(variables.take())
        if steps:
            flat += 1
            variables.take()
            assert any(MOVED in why for why in variables.too_large.values())
        variables.put(taken[0])
        return flat

    taken = Box()
    loop(taken, steps=1)
    lost = loop(taken, steps=0)
    with pytest.raises(RefusedError, match=r"flat is carried(?s:.*)Make tensors that share"):
        lost + 1


def test_memory_that_is_shared_with_an_optimizers_state_in_the_loop_is_refused():
    def loop(taken, *, steps):
        moment, flat = torch.zeros(4), None
        variables = Variables(StateTensors(lambda: [Tracked("moment", SlotRole.OPTIMIZER, moment)]))
        variables.begin()
        if steps:
            flat = torch.zeros(6)
            moment = flat[2:]
        taken.append(variables.take())
        variables.put(taken[0])
        return flat

    taken = Box()
    loop(taken, steps=1)
    assert type(loop(taken, steps=0)) is LostValue


def test_a_container_of_the_loop_may_have_an_optimizers_state_of_set_up():
    """A replacement's variable refers to its own optimizer's tensors after a roll back that came before the loss."""

    def loop(taken, *, steps):
        state, kept = Tracked("moment", SlotRole.OPTIMIZER, torch.zeros(4)), None
        variables = Variables(StateTensors(lambda: [state]))
        variables.begin(others=[state.tensor])
        if steps:
            kept = (3, [state.tensor])
        taken.append(variables.take())
        variables.put(taken[0])
        return kept[0], kept[1][0] is state.tensor

    taken = Box()
    loop(taken, steps=1)
    assert loop(taken, steps=0) == (3, True)


def part_of_an_array():
    array = np.arange(12.0).reshape(4, 3)
    return array, torch.from_numpy(array[:2])


def inner_part_of_an_array():
    array = np.arange(12.0).reshape(4, 3)
    return array, torch.from_numpy(array[:2, :2])


def views_that_overlap():
    whole = torch.zeros(6)
    return whole[:4], whole[2:]


def backwards():
    whole = np.zeros(6)
    return whole[::-1], whole[2:]


SET_UP = {
    "unpacked": lambda: torch.zeros(2, 3),
    "split": lambda: torch.ones(6).split(3),
    "columns": lambda: torch.zeros(3, 2).unbind(1),
    "views that overlap": views_that_overlap,
    "unpacked array": lambda: np.zeros((2, 3)),
    "columns of an array": lambda: np.zeros((3, 2)).T,
    "backwards": backwards,
    "part of an array": part_of_an_array,
    "inner part of an array": inner_part_of_an_array,
    "whole after part": lambda: part_of_an_array()[::-1],
}


@pytest.mark.parametrize("make", SET_UP.values(), ids=SET_UP)
def test_parts_of_one_memory_that_set_up_has_made_come_back(make):
    def loop(taken, *, steps):
        one, other = make()
        variables = Variables()
        variables.begin()
        for _ in range(steps):
            one += 1
            other *= 2
            other += 3
        taken.append(variables.take())
        one -= 5
        other -= 7
        variables.put(taken[0])
        before = [each.tolist() for each in (one, other)]
        one += 1
        return *before, other.tolist()

    def expected(*, steps):
        one, other = make()
        for _ in range(steps):
            one += 1
            other *= 2
            other += 3
        before = [each.tolist() for each in (one, other)]
        one += 1
        return *before, other.tolist()

    for steps in (0, 2):
        taken = Box()
        assert loop(taken, steps=steps) == expected(steps=steps)
        assert loop(taken, steps=0) == expected(steps=steps), "in another process"


@pytest.mark.parametrize("make", SET_UP.values(), ids=SET_UP)
def test_a_new_view_of_a_part_that_set_up_has_made_shares_its_memory_or_is_refused(make):
    def loop(taken, *, steps):
        (one, other), view = make(), None
        variables = Variables()
        variables.begin()
        if steps:
            view = other[1:]
        taken.append(variables.take())
        variables.put(taken[0])
        if type(view) is LostValue:
            return None
        view += 1
        return one.tolist(), other.tolist()

    taken = Box()
    first = loop(taken, steps=1)
    assert first is not None
    assert loop(taken, steps=0) == first


def test_a_new_view_of_several_parts_is_refused():
    def loop(taken, *, steps):
        one, _other = torch.zeros(2, 3)
        variables, view = Variables(), None
        variables.begin()
        if steps:
            view = one._base.view(6)[2:4]
        taken.append(variables.take())
        variables.put(taken[0])
        return view

    taken = Box()
    assert type(loop(taken, steps=1)) is LostValue
    assert type(loop(taken, steps=0)) is LostValue


@pytest.mark.parametrize("make", [torch.zeros, np.zeros])
def test_a_new_view_of_several_parts_refers_to_the_whole_one(make):
    """Also if more parts than are tried begin before it."""

    def loop(taken, *, steps):
        whole, variables, view = make(24), Variables(), None
        parts = [whole[at : at + 2] for at in range(0, 24, 2)]
        variables.begin()
        if steps:
            view = whole[19:23]
        taken.append(variables.take())
        variables.put(taken[0])
        view += 1
        return whole.tolist(), [part.tolist() for part in parts]

    taken = Box()
    found = loop(taken, steps=1)
    assert found[0] == [0.0] * 19 + [1.0] * 4 + [0.0]
    assert [each for part in found[1] for each in part] == found[0]
    assert loop(taken, steps=0) == found


SLICES = {
    "rows": lambda part: part[5:9],
    "columns": lambda part: part[:, 1:],
    "a column": lambda part: part[:, 1],
    "every third row, transposed": lambda part: part[::3].T,
    "an element": lambda part: part[7:8, 1:2],
}


def diagonal(part):
    return part.diagonal()


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("whole", [torch.zeros, np.zeros])
@pytest.mark.parametrize("cut", [*SLICES.values(), diagonal], ids=[*SLICES, "a diagonal"])
def test_a_slice_of_columns_refers_to_them(cut, whole, size):
    """As of `features, labels = table[:, :-1], table[:, -1]`, when no variable has the table."""
    table = whole((size, 4))
    features, labels = table[:, :-1], table[:, -1]
    part = cut(features)
    assert covers(features, part) is (size == 10 or cut is not diagonal)
    assert not covers(features, table)
    assert not covers(features, labels)
    assert not covers(part, features)
    assert not covers(features, table[2:3, 2:])
    assert not covers(features, table.reshape(-1)[1:4])
