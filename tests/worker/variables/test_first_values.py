"""First values that a replacement must have, too: what counts, and what happens if they differ."""

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from deadpool_run.errors import RefusedError
from deadpool_run.worker.variables import first_values
from deadpool_run.worker.variables.values.lost import LostValue
from deadpool_run.worker.variables.variables import Variables

LARGE = first_values.COUNT


class Holder:
    """An object of the script's with variables."""


def restored(was, now, changed=()):
    """Return what the script has after its rank's restore in a process whose set-up gave other values."""
    holder, first = Holder(), Variables()
    vars(holder).update(was)
    first.begin()
    facts = first.facts()
    for name in changed:
        setattr(holder, name, 7)
    taken = first.take()
    for name in was:
        delattr(holder, name)
    vars(holder).update(now)
    second = Variables()
    second.begin()
    second.first.compare(facts, second.facts())
    second.put(taken)
    return holder, second.first


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (torch.zeros(4), torch.ones(4)),
        (torch.zeros(4), torch.zeros(5)),
        (np.zeros(4), np.ones(4)),
        ([1, {"a": (torch.zeros(4), "x")}], [1, {"a": (torch.ones(4), "x")}]),
        (torch.zeros(1 << 20), torch.ones(1 << 20)),
        (np.zeros(1 << 17), np.ones(1 << 17)),
        (list(range(2000, 2008)), [*range(2000, 2007), 2009]),
        ({"train": tuple(range(2000, 2009))}, {"train": tuple(range(2001, 2010))}),
    ],
)
def test_a_step_that_reads_another_tensor_is_refused_unless_training_has_changed_it(was, now):
    holder, _ = restored({"value": was}, {"value": now})
    with pytest.raises(RefusedError, match=r"holder\.value has other numbers here than in the rank's first process"):
        holder.value[0]
    holder, _ = restored({"value": was}, {"value": now}, changed=["value"])
    assert holder.value == 7


@pytest.mark.parametrize(("was", "now"), [(0, 9), (3, -3)])
def test_another_number_is_reported_and_reading_it_is_refused(was, now):
    holder, first = restored({"start": was}, {"start": now})
    (said,) = first.other_numbers
    assert said.endswith(f"holder.start is {now} here and was {was} in the rank's first process")
    assert type(holder.start) is LostValue
    with pytest.raises(RefusedError, match=r"and a step has read it\. Set-up gave another result"):
        holder.start + 1
    holder, first = restored({"start": was}, {"start": now}, changed=["start"])
    assert (holder.start, first.other_numbers) == (7, [])


def test_another_number_on_another_machine_is_only_reported(monkeypatch):
    names = iter(["one", "two"])
    monkeypatch.setattr(first_values, "_machine", lambda: next(names))
    holder, first = restored({"cores": 8000}, {"cores": 16000})  # no file descriptors of the test's process
    assert holder.cores == 16000
    assert len(first.other_numbers) == 1


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (1.0, 2.0),
        ("/one", "/two"),
        (LARGE, LARGE + 1),
        (-LARGE, LARGE),
        (os.getpid(), 5),
        (1, 1.0),
        (False, True),
        ([1, 2], [1, 3]),
        (random.Random(1), random.Random(2)),
        (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)),
        (np.float64(time.time()), np.float64(0)),
        (["tensor", "a"], ["tensor", "b"]),
        (None, 3),
        (list(range(40000, 40008)), list(range(50000, 50008))),
    ],
    ids=map(str, range(14)),
)
def test_other_values_may_differ(was, now):
    holder, first = restored({"value": was}, {"value": now})
    assert holder.value is now
    assert first.other_numbers == []


def test_the_place_on_the_machine_may_differ(monkeypatch):
    places = iter(["1", "3"])
    monkeypatch.setattr(first_values, "_place", lambda: int(next(places)))
    holder, first = restored({"place": 1}, {"place": 3})
    assert (holder.place, first.other_numbers) == (3, [])


def test_file_descriptors_and_ports_may_differ():
    """A script may open its log in set-up: each process has another number for it."""
    with Path("/dev/null").open() as one, Path("/dev/null").open() as other:
        holder, first = restored({"log": one.fileno()}, {"log": other.fileno()})
        assert (holder.log, first.other_numbers) == (other.fileno(), [])
        holder, _ = restored({"start": 0}, {"start": other.fileno()})
        assert type(holder.start) is LostValue
    holder, first = restored({"port": 40001}, {"port": 50002})
    assert (holder.port, first.other_numbers) == (50002, [])
