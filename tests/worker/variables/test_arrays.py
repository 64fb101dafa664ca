"""Arrays with fields, and files in memory: tables of losses and priorities that a loop writes to and reads later."""

import numpy as np
import pytest
from kit.taken import Taken

from deadpool_run.errors import RefusedError
from deadpool_run.worker.variables.variables import Variables

FIELDS = np.dtype([("seen", "f4", (2,)), ("priority", "f8"), ("age", [("steps", "i2"), ("epochs", "i4")])], align=True)
LARGE = 5_000
STEPS = 5


def with_fields(rows):
    def make(_):
        return np.zeros(rows, FIELDS)

    return make


def in_a_file(rows):
    def make(folder):
        return np.memmap(folder / "table.bin", dtype=FIELDS, mode="w+", shape=(rows,))

    return make


def loop(make, folder, taken, *, steps):
    """Write to a table in each step; the snapshot is of step 3. Return its rows, one of its fields, and a row of it."""
    variables, table = Variables(), make(folder)
    priorities, row, kind = table["priority"], None, type(table)
    variables.begin()
    for step in range(steps):
        table["seen"][step] = step + 1
        priorities[step + 1] += step
        table["age"]["steps"] += 1
        row = table[step : step + 2]
        if step == 3 and not taken:
            taken.append(variables.take())
        else:
            variables.take()
    variables.put(taken[0])
    assert type(table) is kind
    priorities[0] = 9.0
    row["seen"][0] = 8.0
    seen, steps = table["seen"][:STEPS, 0].tolist(), table["age"]["steps"][:STEPS].tolist()
    return seen, steps, table["priority"][:STEPS].tolist(), priorities[:STEPS].tolist()


@pytest.mark.parametrize("make", [with_fields(8), with_fields(LARGE), in_a_file(8), in_a_file(LARGE)])
def test_a_table_comes_back_with_its_views(make, tmp_path):
    taken = Taken()
    first = loop(make, tmp_path, taken, steps=STEPS)
    assert first == ([1, 2, 3, 8, 0], [4] * 5, [9, 0, 1, 2, 3], [9, 0, 1, 2, 3])
    for steps in (0, 2):
        assert loop(make, tmp_path, Taken(taken), steps=steps) == first


def test_a_table_of_another_class_is_refused_when_it_is_used():
    def run(taken, *, steps):
        variables, table = Variables(), np.ma.zeros(4)
        variables.begin()
        for step in range(steps):
            table[step] = step + 1
        if not taken:
            taken.append(variables.take())
        variables.put(taken[0])
        return table

    taken = Taken()
    run(taken, steps=3)
    with pytest.raises(RefusedError, match="it is an array of class MaskedArray with elements of class float64"):
        run(taken, steps=0)[0]
