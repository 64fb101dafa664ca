"""Steps per second: an average over what was seen."""

import pytest

from deadpool_run.view.pace import Pace


def seen(steps, every_s=1.0, recorded=None):
    pace = Pace()
    pace.recorded = recorded
    for look, done in enumerate(steps):
        pace.note(done, look * every_s)
    return pace.per_s()


def test_the_rate_is_an_average_and_does_not_follow_a_single_step():
    steady = seen(range(0, 300, 3))
    assert steady == pytest.approx(3.0)
    jumping = [3 * look + (look % 2) for look in range(100)]
    assert seen(jumping) == pytest.approx(3.0, rel=0.02)


def test_steps_that_are_slower_than_looks_are_counted_from_one_to_the_next():
    assert seen([look // 30 for look in range(30 * 5)]) == pytest.approx(1 / 30)
    assert seen([100] * 29) is None
    assert seen([100] * 10 + [101] * 10) is None, "when the first of two steps ended is not known"


def test_a_repair_counts_and_a_restart_begins_again():
    repaired = [*range(10, 50), *[49] * 20, *range(49, 60)]
    assert 0.5 < seen(repaired) < 0.9
    assert seen([*range(1000, 1050), *range(30)]) == pytest.approx(1.0)


def test_records_are_better_than_a_few_looks():
    assert seen([0, 1, 5], recorded=3.0) == 3.0
    assert seen(range(0, 30, 2), recorded=3.0) == pytest.approx(2.0)
    assert seen([0], recorded=None) is None
