"""The steps are taken by one loop: ways to take them, exact ones and others."""

import itertools

import pytest

from deadpool_run.errors import ScriptError
from deadpool_run.worker.loop.only_loop import OnlyLoop


class Bar:
    """A progress bar, as tqdm's."""

    def __init__(self, items):
        self._items = items

    def __iter__(self):
        yield from self._items


def doubled(items):
    for item in items:
        yield 2 * item


ONE_LOOP = {
    "list": list,
    "a comprehension": lambda steps: [1 * step for step in steps],
    "a progress bar": lambda steps: [*Bar(steps)],
    "a generator": lambda steps: [step // 2 for step in doubled(Bar(steps))],
    "enumerate": lambda steps: [step for _, step in enumerate(steps)],
    "zip": lambda steps: [step for _, step in zip(range(9), steps, strict=False)],
    "map": lambda steps: [*map(int, steps)],
    "iter": lambda steps: [*iter(iter(steps))],
}


@pytest.mark.parametrize("take", ONE_LOOP.values(), ids=ONE_LOOP)
def test_one_loop_takes_all(take):
    assert take(OnlyLoop("steps", iter(range(4)))) == [0, 1, 2, 3]


def breaks(steps):
    for step in steps:
        if step == 1:
            break
    return [*steps]


def slices_twice(steps):
    return [*itertools.chain.from_iterable(zip(range(2), steps, strict=False) for _ in range(2))]


def asks(steps):
    return [next(steps) for _ in range(2)]


SECOND = r"second loop takes steps from the same job\.steps\(\).*\nTake all steps in one loop"
OTHERS = {
    "a loop after another": (breaks, SECOND),
    "a zip in each epoch": (slices_twice, SECOND),
    "next": (asks, r"next\(\) was called on job\.steps\(\).*\nTake all steps in one loop"),
    "islice": (
        lambda steps: [*itertools.islice(steps, 2)],
        r"islice\(\) counts .*\nPass the number of steps: job\.steps\(N\)",
    ),
    "a bar around islice": (lambda steps: [*Bar(itertools.islice(steps, 2))], r"islice\(\) counts"),
}


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
