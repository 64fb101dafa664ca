"""The steps are taken by one loop: ways to take them, exact ones and others."""

import sys
from itertools import islice

import pytest

from deadpool_run.errors import ScriptError
from deadpool_run.worker.loop.only_loop import OnlyLoop


class Bar:
    """A progress bar, as tqdm's."""

    def __init__(self, items):
        self._items = items

    def __iter__(self):
        yield from self._items


class Counted:
    """A progress bar with a method for the next item."""

    def __init__(self, items):
        self._items = items
        self.count = 0

    def __iter__(self):
        self._items = iter(self._items)
        return self

    def __next__(self):
        item = next(self._items)
        self.count += 1
        return item


def doubled(items):
    for item in items:
        yield 2 * item


def taken(items):
    got = []
    for item in items:
        got.append(item)  # noqa: PERF402 - what a `for` statement takes
    return got


ONE_LOOP = {
    "for": taken,
    "a progress bar": lambda steps: taken(Bar(steps)),
    "an iterator": lambda steps: taken(Counted(Bar(steps))),
    "a generator": lambda steps: [step // 2 for step in taken(doubled(Bar(steps)))],
    "an expression": lambda steps: taken(1 * step for step in steps),
    "enumerate": lambda steps: [step for _, step in taken(enumerate(steps))],
    "zip": lambda steps: [step for _, step in taken(zip(range(9), steps, strict=False))],
    "map": lambda steps: taken(map(int, steps)),
    "iter": lambda steps: taken(iter(iter(steps))),
}


@pytest.mark.parametrize("take", ONE_LOOP.values(), ids=ONE_LOOP)
def test_one_loop_takes_all(take):
    assert take(OnlyLoop("steps", iter(range(4)))) == [0, 1, 2, 3]


def breaks(steps):
    for step in steps:
        if step == 1:
            break
    taken(steps)


def zips_twice(steps):
    for _ in range(2):
        taken(zip(range(2), steps, strict=False))


def slices_twice(steps):
    for _ in range(2):
        taken(islice(steps, 2))


def unpacks(steps):
    first, *_ = steps
    return first


SECOND = r"second loop takes steps from the same job\.steps\(\).*\nTake all steps in one loop"
CALL = r"are taken by a call or a comprehension.*\nTake all steps in one loop"
COUNTS = r"islice\(\) counts .*\nPass the number of steps: job\.steps\(N\)"
OTHERS = {
    "a loop after another": (breaks, SECOND),
    "a zip in each epoch": (zips_twice, SECOND),
    "a slice in each epoch": (slices_twice, COUNTS),
    "next": (next, CALL),
    "list": (list, CALL),
    "next of an iterator": (lambda steps: next(iter(Counted(steps))), CALL),
    "sum": (lambda steps: sum(1 * step for step in steps), CALL),
    "unpacking": (unpacks, CALL),
    "islice": (lambda steps: taken(islice(steps, 2)), COUNTS),
    "a bar around islice": (lambda steps: taken(Bar(islice(steps, 2))), COUNTS),
}
if sys.version_info < (3, 12):
    OTHERS["a comprehension"] = (lambda steps: [1 * step for step in steps], CALL)


@pytest.mark.parametrize(("take", "text"), OTHERS.values(), ids=OTHERS)
def test_others_are_refused(take, text):
    with pytest.raises(ScriptError, match=text):
        take(OnlyLoop("steps", iter(range(4))))


def test_a_loop_that_is_left_ends_what_it_took():
    ended = []

    def steps():
        try:
            yield from range(3)
        finally:
            ended.append(True)

    for step in OnlyLoop("steps", steps()):
        if step == 1:
            break
    assert ended == [True], "as with a generator"
