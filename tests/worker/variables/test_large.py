"""Large tensors and arrays in variables come back bit for bit. Larger ones are lost, and a script that uses them is refused."""

import collections
import pickle

import numpy as np
import pytest
import torch

from deadpool_run.errors import RefusedError
from deadpool_run.worker.compat.writes import note_collective
from deadpool_run.worker.variables.values import tensors
from deadpool_run.worker.variables.values.lost import LostValue
from deadpool_run.worker.variables.values.tensors import TensorCopies
from deadpool_run.worker.variables.variables import Variables

LARGE = 100_000
"""Numbers of four bytes: too many to be written in line."""
TOO_LARGE = 17 << 20


class Box(list):
    """A list that snapshots do not keep, because its class has slots."""

    __slots__ = ()


class Ring:
    def __init__(self):
        self.tensor, self.array = torch.zeros(1000, 100), np.zeros((1000, 1000), np.float32)
        self.n = 0

    def add(self, value):
        self.tensor[self.n % 1000] = value
        self.array[self.n % 1000] = value
        self.n += 1


def gather(variables, *, until, and_then, taken):
    """Run a loop that gathers data of all kinds in variables, then restore. Return the variables."""
    ring, average, moments = Ring(), torch.zeros(LARGE), [torch.zeros(LARGE), torch.ones(LARGE)]
    by_number, wave, hand = {0: torch.zeros(LARGE)}, torch.zeros(LARGE, dtype=torch.complex64), torch.zeros(LARGE)
    hand.requires_grad_()
    losses, groups = collections.deque(maxlen=20_000), None
    still = torch.arange(LARGE)
    variables.begin()
    for step in range(until + and_then):
        if step == until:
            taken.append(variables.take())
        ring.add(step + 1)
        average = 0.9 * average + step
        if step % 2:
            moments[1].mul_(1.5)
        by_number[step] = torch.full((LARGE,), float(step))
        wave = (wave + 1j).conj()
        (hand * step).sum().backward()
        with torch.no_grad():
            hand -= 0.1 * hand.grad
        losses.extend(range(step, step + 7000))
        groups = collections.defaultdict(list, {step: [step]}) if step >= 0 else groups
    taken.append(variables.take())
    variables.put(taken[0])
    groups = groups or collections.defaultdict(list)
    groups["new"].append(1)
    tensors = ring.tensor, average, *moments, *by_number.values(), wave, hand.detach(), still
    grad = None if hand.grad is None else hand.grad.tolist()
    return [each.tolist() for each in tensors], ring.array.tolist(), ring.n, list(losses), dict(groups), grad


@pytest.mark.parametrize("until", [0, 1, 5])
def test_steps_after_a_snapshot_are_undone(until):
    assert gather(Variables(), until=until, and_then=3, taken=Box()) == gather(
        Variables(), until=until, and_then=0, taken=[]
    )


@pytest.mark.parametrize("rehearsed", [0, 2])
def test_another_process_gets_what_the_first_one_had(rehearsed):
    taken = Box()
    gather(Variables(), until=5, and_then=1, taken=taken)
    replaced = gather(Variables(), until=rehearsed, and_then=0, taken=Box(taken[:1]))
    assert replaced == gather(Variables(), until=5, and_then=0, taken=Box())


def large_tensors(taken):
    return [tensor.data_ptr() for tensor in taken["large"]]


def test_a_tensor_is_copied_again_only_when_it_has_changed():
    variables, kept = Variables(), [torch.zeros(LARGE), torch.zeros(LARGE)]
    variables.begin()
    kept[0] += 1
    taken = Box([variables.take(), variables.take()])
    kept[1] += 1
    taken.append(variables.take())
    first, again, changed = map(large_tensors, taken)
    assert first == again
    assert changed[0] == first[0]
    assert changed[1] != first[1]


@pytest.mark.parametrize("write", [lambda each: each.data.mul_(2), lambda each: each.numpy().fill(3)])
def test_writes_that_torch_does_not_count_are_seen(write):
    variables, average = Variables(), torch.ones(LARGE)
    variables.begin()
    write(average)
    taken, written = variables.take(), average.clone()
    average.zero_()
    variables.put(taken)
    assert torch.equal(average, written)


def test_one_row_of_a_large_array_is_seen_in_the_end():
    variables, array = Variables(), np.zeros((4000, 1000))
    variables.begin()
    for _ in range(5):
        variables.take()
    array[1234, 5] = 1
    for _ in range(3):
        taken = variables.take()
    array[1234, 6] = 2
    taken = variables.take()
    array[:] = 7
    variables.put(taken)
    assert (array.sum(), array[1234, 5], array[1234, 6]) == (3, 1, 2)


class Visit:
    def __init__(self):
        self.count, self.by_name = 0, {"n": 0}


def one_element_of_an_array():
    return np.zeros(2_500_000), lambda each: each.__setitem__(1_234_567, 1)


def one_element_of_a_tensor():
    return torch.zeros(2_500_000), lambda each: each.data.__setitem__(1_234_567, 1)


def a_value_in_a_list_of_dicts():
    return [{"name": str(n), "count": n} for n in range(3000)], lambda each: each[1234].update(count=0)


def an_attribute_in_a_list_of_objects():
    return [Visit() for _ in range(2000)], lambda each: vars(each[1234]).update(count=1)


def a_dict_in_a_list_of_objects():
    return collections.deque(Visit() for _ in range(2000)), lambda each: each[1234].by_name.update(n=1)


CONTAINERS = [a_value_in_a_list_of_dicts, an_attribute_in_a_list_of_objects, a_dict_in_a_list_of_objects]


@pytest.mark.parametrize("make", [one_element_of_an_array, one_element_of_a_tensor])
def test_a_change_of_one_element_comes_back(make):
    def loop(taken, *, steps):
        variables = Variables()
        large, change = make()
        variables.begin()
        for _ in range(steps):
            variables.take()
        if steps:
            change(large)
        taken.append(variables.take())
        variables.put(taken[0])
        return large[1_234_567]

    taken = Box()
    assert loop(taken, steps=5) == 1
    assert loop(taken, steps=0) == 1


@pytest.mark.parametrize("make", CONTAINERS)
def test_a_change_inside_a_large_container_is_seen(make):
    def loop(taken, *, changes):
        variables = Variables()
        large, change = make()
        variables.begin()
        for _ in range(5):
            variables.take()
        if changes:
            change(large)
        taken.append(variables.take())
        variables.put(taken[0])
        return large

    taken, unchanged = Box(), Box()
    assert type(loop(taken, changes=True)) is not LostValue  # nothing has changed since
    assert type(loop(taken, changes=False)) is LostValue
    assert type(loop(unchanged, changes=False)) is not LostValue
    assert type(loop(unchanged, changes=False)) is not LostValue


@pytest.mark.parametrize("make", CONTAINERS)
def test_a_survivor_loses_a_large_container_that_an_interrupted_step_has_changed(make):
    variables = Variables()
    large, change = make()
    variables.begin()
    large[0] = large[1]
    taken = variables.take()
    change(large)
    variables.put(taken)
    assert type(large) is LostValue


def test_a_survivor_loses_a_huge_array_that_changes():
    """As of a buffer of transitions: it may have the row of an interrupted step."""
    variables, buffer = Variables(), np.zeros((17_000, 1000), np.float32)
    variables.begin()
    variables.put(variables.take())
    assert buffer.shape == (17_000, 1000)
    buffer[12_345, 1:500] = 1
    variables.put(variables.take())
    assert type(buffer) is LostValue


def test_weights_and_what_shares_their_memory_are_kept_otherwise():
    weight, other = torch.nn.Parameter(torch.zeros(LARGE)), torch.zeros(LARGE)
    alias, view, held, variables = weight.data, weight.data[10:], [weight], Variables()
    variables.begin(others=[weight])
    with torch.no_grad():
        weight += 1
    other += 1
    taken = variables.take()
    assert len(taken["large"]) == 1
    assert alias[0] == view[0] == held[0][0] == other[0]


def test_a_replacement_cannot_use_data_that_was_too_large():
    def loop(taken, *, steps):
        variables = Variables()
        huge, log, words = torch.zeros(TOO_LARGE), [], collections.Counter()
        variables.begin()
        for step in range(steps):
            huge[step] = 1
            log.extend(["x"] * 5000)
            words.update(map(str, range(5000 * step, 5000 * step + 5000)))
        taken.append(variables.take())
        variables.put(taken[0])
        return huge, log, words

    taken = Box()
    first = loop(taken, steps=4)
    assert [float(first[0].sum()), len(first[1]), len(first[2])] == [4, 20_000, 20_000]  # nothing has changed since
    huge, log, words = loop(Box(taken[:1]), steps=2)
    assert f"{huge}".endswith("loop().huge was lost>")
    log.append("y")
    words.update(["z"])
    for use in (
        lambda: huge[0],
        lambda: huge.sum,
        lambda: torch.add(torch.ones(1), huge),
        lambda: torch.stack([torch.ones(1), huge]),
        lambda: huge + 1,
        lambda: 1 - huge,
        lambda: len(log),
        lambda: list(log),
        lambda: bool(words),
        lambda: "x" in words,
        lambda: pickle.dumps(words),
        lambda: np.asarray(log),
        lambda: setattr(huge, "requires_grad", True),
    ):
        with pytest.raises(RefusedError, match=r"(?s)(huge|log|words) is carried from step to step.*protect"):
            use()


@pytest.mark.parametrize(
    "change", [lambda each: each.append("y"), lambda each: each.pop(), lambda each: each.insert(0, 1)]
)
def test_a_survivor_keeps_a_list_that_was_only_appended_to(change):
    variables, log = Variables(), ["x"] * 5000
    variables.begin()
    log.append("z")
    taken = variables.take()
    expected = list(log)
    change(log)
    variables.put(taken)
    if type(log) is list:
        assert log == expected
    else:
        assert type(log) is LostValue


def test_data_that_was_first_changed_after_the_snapshot_is_lost_too():
    variables, huge, table = Variables(), torch.zeros(TOO_LARGE), {str(n): n for n in range(5000)}
    variables.begin()
    taken = variables.take()
    variables.put(taken)
    assert (huge.sum(), table["7"]) == (0, 7)
    huge += 1
    table["7"] = 8
    variables.put(taken)
    assert type(huge) is type(table) is LostValue


def test_a_change_inside_a_large_dict_is_seen_at_growing_distances():
    variables, table = Variables(), {str(n): n for n in range(5000)}
    variables.begin()
    assert not variables.take()["large"]
    table["7"] = 8
    variables.take()
    variables.put(variables.take())
    assert table["7"] == 8
    taken = variables.take()
    table["7"] = 9
    table["8"] = 9
    del table["9"]
    variables.put(taken)
    assert type(table) is LostValue


def test_what_nobody_asked_for_is_put_back_after_the_trial():
    variables, huge, read, batch = Variables(), torch.zeros(TOO_LARGE), torch.zeros(TOO_LARGE), None
    variables.begin()
    taken = variables.take()
    huge += 1
    read += 1
    batch = torch.zeros(TOO_LARGE)
    variables.trying = True
    variables.put(taken)
    assert batch is None
    with pytest.raises(RefusedError):
        read.sum()
    with pytest.raises(RefusedError):
        huge.append(1)
    read = 5
    variables.trying = False
    variables.put_back()
    assert (float(huge[0]), read) == (1, 5)


def test_a_tensor_loses_its_graph_and_not_its_value():
    variables, weight = Variables(), torch.ones(2, requires_grad=True)
    total = 0.0
    variables.begin()
    total = total + (3 * weight).sum()
    taken = variables.take()
    total = total + 100
    variables.put(taken)
    assert float(total.detach()) == 6
    assert total.requires_grad
    with pytest.raises(RefusedError, match="graph of an earlier step"):
        (total + weight.sum()).backward()


def test_all_variables_together_have_a_limit():
    variables = Variables()
    a, b, c, d, e, f = (torch.zeros(12 << 20) for _ in range(6))
    variables.begin()
    for each in (a, b, c, d, e, f):
        each.add_(1)
    taken = Box([variables.take()])
    assert sum(tensor.nbytes for tensor in taken[0]["large"]) <= 256 << 20
    for each in (a, b, c, d, e, f):
        each.add_(1)
    variables.put(taken[0])
    lost = [each for each in (a, b, c, d, e, f) if type(each) is LostValue]
    assert len(lost) == 1


def test_tensors_that_cannot_be_read_are_left_alone():
    variables = Variables()
    small, large, count = torch.ones(8), torch.ones(LARGE), 0
    base = torch.ones(4, requires_grad=True) * 1
    broken, _ = base.split(2)
    base.add_(1)
    with pytest.raises(RuntimeError):
        _ = broken.grad_fn
    small.untyped_storage().resize_(0)
    variables.begin()
    large.untyped_storage().resize_(0)
    count += 1
    taken = variables.take()
    assert [name for name, _ in variables.tensors()] == []
    count += 1
    variables.put(taken)
    assert count == 1


def test_a_write_of_a_collective_is_seen_where_not_every_byte_is_compared():
    """Torch does not count it, and samples of a large tensor may miss it."""
    copies = TensorCopies()
    kept = [torch.zeros(8 << 20) for _ in range(3)]
    copies.begun()
    first = [copies.of_tensor(each) for each in kept]
    copies.next(thorough=False)
    assert [copies.of_tensor(each) for each in kept] == first
    kept[-1].data[4321] = 1  # as a collective writes
    note_collective([kept[-1].view(2, -1)[1]])
    copies.next(thorough=False)
    assert copies.of_tensor(kept[0]) is first[0]
    assert copies.of_tensor(kept[1]) is first[1]
    assert torch.equal(copies.of_tensor(kept[2]).tensor, kept[2])


@pytest.mark.parametrize("at", [0, 4321, -1], ids=["first page", "inside", "last page"])
@pytest.mark.parametrize("kind", ["tensor", "array", "view"])
def test_one_element_that_changes_after_many_snapshots_is_seen(kind, at):
    """From the sixth on the kernel watches the memory, where it can."""
    copies = TensorCopies()
    memory = torch.zeros((1 << 20) + 5)
    value = memory.numpy() if kind == "array" else memory[3:-1] if kind == "view" else memory
    copy_of = copies.of_array if kind == "array" else copies.of_tensor
    first = copy_of(value)
    copies.begun()
    for _ in range(8):
        copies.next(thorough=False)
        assert copy_of(value) is first
    (value if kind == "array" else value.data)[at] = 1
    copies.next(thorough=False)
    changed = copy_of(value)
    assert changed is not first
    for _ in range(8):
        copies.next(thorough=False)
        assert copy_of(value) is changed
    (value if kind == "array" else value.data)[at] = 2
    copies.next(thorough=False)
    assert copy_of(value) is not changed


def test_another_memory_of_a_tensor_is_compared():
    copies = TensorCopies()
    value = torch.zeros(1 << 20)
    first = copies.of_tensor(value)
    copies.begun()
    for _ in range(8):
        copies.next(thorough=False)
        assert copies.of_tensor(value) is first
    other = torch.zeros(1 << 20)
    other[4321] = 1
    value.data = other
    copies.next(thorough=False)
    assert torch.equal(copies.of_tensor(value).tensor, other)


@pytest.mark.parametrize("first", ["the tensor", "the array"])
def test_two_that_share_memory_both_see_a_change(first):
    """To watch the memory again for one of them must not hide the change from the other."""
    copies = TensorCopies()
    tensor = torch.zeros(1 << 20)
    array = tensor.numpy()
    looks = [lambda: copies.of_tensor(tensor), lambda: copies.of_array(array)]
    looks = looks if first == "the tensor" else looks[::-1]
    kept = [look() for look in looks]
    copies.begun()
    for _ in range(8):
        copies.next(thorough=False)
        assert [look() for look in looks] == kept
    array[4321] = 1
    copies.next(thorough=False)
    assert not any(now is before for now, before in zip([look() for look in looks], kept, strict=True))


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_a_change_for_which_there_is_no_room_is_not_forgotten(kind, monkeypatch):
    copies = TensorCopies()
    tensor = torch.zeros(1 << 20)
    copy_of, value = (copies.of_tensor, tensor) if kind == "tensor" else (copies.of_array, tensor.numpy())
    first = copy_of(value)
    copies.begun()
    for _ in range(8):
        copies.next(thorough=False)
        assert copy_of(value) is first
    monkeypatch.setattr(tensors, "_MOST_IN_ALL", 0)
    tensor.data[4321] = 1
    for _ in range(3):
        copies.next(thorough=False)
        assert copy_of(value) is None
