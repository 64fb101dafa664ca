"""Containers of modules that are not protected: what a step appends is gone after a restore, and what it drops is back."""

import pytest
import torch
from kit.taken import Taken
from torch import nn

from deadpool_run.errors import RefusedError
from deadpool_run.worker.variables.variables import Variables


def metric(value):
    made = nn.Module()
    made.register_buffer("total", torch.tensor(float(value)))
    return made


def totals(found):
    return [each.total.item() for each in found]


def drop_first(found):
    del found[0]


CHANGES = {
    "appends": lambda found: found.append(metric(9)),
    "drops the first": drop_first,
    "drops the last": lambda found: found.pop(-1),
    "exchanges one": lambda found: found.__setitem__(1, metric(9)),
    "inserts": lambda found: found.insert(0, metric(9)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_survivors_list_is_as_at_the_snapshot(change):
    variables, found = Variables(), nn.ModuleList(map(metric, range(3)))
    inside = list(found)
    variables.begin()
    taken = variables.take()
    change(found)
    variables.put(taken)
    assert [*found] == inside
    assert [*found._modules] == ["0", "1", "2"]


def appended(taken, made, *, count):
    """Append so many modules, take a snapshot or use the one taken before, append one more, and put back."""
    variables, found = Variables(), nn.ModuleList([metric(0)])
    variables.begin()
    for number in range(count):
        found.append(made(number + 1))
    taken.append(variables.take())
    found.append(made(9))
    variables.put(taken[0])
    return found


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_replacement_has_what_training_has_appended(count):
    taken = Taken()
    assert totals(appended(taken, metric, count=2)) == [0, 1, 2]
    assert totals(appended(taken, metric, count=count)) == [0, 1, 2]


def test_modules_by_name_come_back():
    variables, found = Variables(), nn.ModuleDict({"a": metric(1), "b": metric(2)})
    variables.begin()
    taken = variables.take()
    found["c"] = metric(3)
    del found["a"]
    variables.put(taken)
    assert {name: each.total.item() for name, each in found.items()} == {"a": 1, "b": 2}


def with_a_closure(value):
    """A metric as torchmetrics makes it: its methods are functions that were made for it."""
    made = metric(value)
    made.update = lambda: made.total.add_(1)
    return made


def test_a_replacement_refuses_a_list_with_a_module_that_cannot_be_kept():
    taken = Taken()
    assert totals(appended(taken, with_a_closure, count=2)) == [0, 1, 2]
    with pytest.raises(RefusedError, match=r"modules\.[12] is carried from step to step, and snapshots do not keep it"):
        appended(taken, with_a_closure, count=0)
