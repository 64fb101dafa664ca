"""Variables in memory to which several ranks write are not restored, which would undo what others have written."""

import mmap
import subprocess
import sys

import numpy as np
import pytest
import torch

from deadpool_run.errors import RefusedError
from deadpool_run.worker.variables.values.lost import LostValue
from deadpool_run.worker.variables.values.shared_memory import SharedMappings
from deadpool_run.worker.variables.variables import Variables

NBYTES = 1 << 20
MAP = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0, access=getattr(mmap, sys.argv[2]))
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "memory"
    path.write_bytes(bytes(NBYTES))
    return path


def mapped(path):
    """Return the file in memory. Not a fixture, so that it is closed with the last array of a test."""
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


@pytest.fixture
def another(path):
    """Return a function that starts a process that maps the file."""
    started = []

    def start(access="ACCESS_WRITE"):
        command = [sys.executable, "-c", MAP, path, access]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout.readline() == "mapped\n"
        return started[-1]

    yield start
    for each in started:
        each.communicate()


def with_others(*others):
    return SharedMappings(lambda: iter([each.pid for each in others]))


class Box(list):
    """A list that snapshots do not keep, because its class has slots."""

    __slots__ = ()


def whole_array(memory, count):
    return np.frombuffer(memory, np.float64, count)


def part_of_an_array(memory, count):
    return np.frombuffer(memory, np.float64)[8 : 8 + count]


def tensor(memory, count):
    return torch.from_numpy(whole_array(memory, count))


MAKE = [whole_array, part_of_an_array, tensor]
SIZES = [8, 50_000]


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("trying", [False, True])
@pytest.mark.parametrize("to", [0, 1])
def test_memory_that_other_ranks_write_is_left_as_it_is(path, another, make, count, *, trying, to):
    memory = mapped(path)
    mine, step, variables = make(memory, count), 0, Variables(shared=with_others(another()))
    variables.begin()
    taken = Box([variables.take()])
    mine[3], step = 1, 1
    taken.append(variables.take())
    mine[4], step = 2, 2
    variables.trying = trying
    variables.put(taken[to])
    assert (step, type(mine)) == (to, LostValue)
    with pytest.raises(RefusedError, match=r"(?s)mine is carried .* other ranks of the node can write to its memory"):
        mine[3] += 1
    assert sorted(set(make(memory, count).tolist())) == [0, 1, 2]
    variables.put_back()
    assert (type(mine) is LostValue) is not trying


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("count", SIZES)
def test_memory_that_nobody_writes_is_kept(path, another, make, count):
    memory = mapped(path)
    whole_array(memory, 100)[:] = 5
    data, step, batch = make(memory, count), 0, None
    variables = Variables(shared=with_others(another()))
    variables.begin()
    for step in range(3):
        batch = data[step : step + 3] * 2
        taken = variables.take()
    step, batch = 3, data[0:3] * 4
    variables.put(taken)
    assert (step, batch.tolist(), data.tolist()[:3]) == (2, [10, 10, 10], [5, 5, 5])
    assert not variables.too_large


@pytest.mark.parametrize("make", MAKE)
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("other", [False, True])
def test_memory_that_only_this_rank_writes_is_restored(path, another, make, count, other):
    """Others may read it."""
    memory = mapped(path)
    mine = make(memory, count)
    variables = Variables(shared=with_others(*([another("ACCESS_READ")] if other else [])))
    variables.begin()
    mine[3] = 1
    taken = variables.take()
    mine[3] = 2
    variables.put(taken)
    assert mine[3] == 1
    assert 2 not in make(memory, count)


def test_what_a_script_finds_in_written_memory_only_in_the_loop_is_not_kept(path, another):
    memory = mapped(path)
    mine, variables = None, Variables(shared=with_others(another()))
    variables.begin()
    mine = whole_array(memory, 8)
    variables.put(variables.take())
    mine = whole_array(memory, 8)
    variables.put(variables.take())
    assert mine.tolist() == [0] * 8
    memory[0] = 1
    assert mine[0] != 0


def test_a_change_of_one_variable_shows_that_others_of_the_memory_are_written(path, another):
    memory = mapped(path)
    mine, other = whole_array(memory, 4), np.frombuffer(memory, np.float64, 4, 800)
    variables = Variables(shared=with_others(another()))
    variables.begin()
    mine[0] = 1
    variables.take()
    taken = variables.take()
    mine[1] = other[1] = 1
    variables.put(taken)
    assert (type(mine), type(other)) == (LostValue, LostValue)


def test_memory_that_another_rank_maps_later_is_found(path, another):
    mine, others = whole_array(mapped(path), 8), Box()
    variables = Variables(shared=SharedMappings(lambda: iter(others)))
    variables.begin()
    mine[0] = 1
    variables.put(variables.take())
    assert mine[0] == 1
    others.append(another().pid)
    mine[0] = 2
    taken = variables.take()
    mine[0] = 3
    variables.put(taken)
    assert type(mine) is LostValue
