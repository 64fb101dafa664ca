"""The committed version, computed from the nodes' reports about their ranks' buddies."""

import time

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deadpool_run.core.copies.commit import MAX_TOLD, Commits
from deadpool_run.ids import Rank, Version


def commits(*safe, timeline=1):
    """Return what two ranks (or as many as there are reports) have made of their reports."""
    made = Commits(len(safe))
    made.begin(timeline)
    for rank, versions in enumerate(safe):
        made.safe(Rank(rank), tuple(map(Version, versions)), True, timeline)
    return made


@pytest.mark.parametrize(
    ("safe", "committed", "abandoned"),
    [
        (((), ()), None, set()),
        (((0,), ()), None, set()),
        (((0,), (0,)), 0, set()),
        (((0, 1), (0,)), 0, set()),
        (((0, 1), (0, 1)), 1, set()),
        (((1, 2), (0, 1)), 1, set()),
        (((0, 2), (0, 1)), 0, {1}),
        (((0, 1), (0, 2)), 0, {1}),
        (((0, 2), (0, 1, 3)), 0, {1, 2}),
        (((2,), (1,)), None, {1}),
    ],
)
def test_what_is_committed(safe, committed, abandoned):
    made = commits(*safe)
    assert (made.committed, made.abandoned) == (committed, abandoned)


def test_what_was_committed_stays_so_when_buddies_change():
    made = commits((0, 1), (0, 1))
    made.safe(Rank(0), (), True, 1)
    assert made.committed == 1
    assert not made.protected
    made.safe(Rank(0), (Version(1),), True, 1)
    assert made.committed == 1
    assert made.protected


def test_what_is_older_than_the_committed_version_protects_nothing():
    """A new buddy got it from an owner that had not heard of the commit; the other rank has overwritten it."""
    made = commits((0, 1), (0, 1))
    made.replaced(Rank(0))
    made.safe(Rank(0), (Version(0),), True, 1)
    assert not made.protected
    made.safe(Rank(0), (Version(0), Version(1)), True, 1)
    assert made.protected


def test_a_world_is_protected_when_every_transcript_is_safe_as_well():
    made = commits((0,), (0,))
    assert made.protected
    made.safe(Rank(1), (Version(0),), False, 1)
    assert not made.protected


def test_what_is_abandoned_is_never_committed_in_that_timeline():
    made = commits((0,), (0,))
    made.skipped(Rank(1), Version(1))
    assert made.abandoned == {1}
    made.safe(Rank(0), (Version(0), Version(1)), True, 1)
    made.safe(Rank(1), (Version(0), Version(1)), True, 1)
    assert made.committed == 0, "whoever was told may have overwritten it"
    made.discard_above(2, Version(0))
    assert made.abandoned == set()
    for rank in (0, 1):
        made.safe(Rank(rank), (Version(0), Version(1)), True, 2)
    assert made.committed == 1


def test_a_version_before_the_one_resumed_from_protects_nothing():
    made = commits((1, 2), (1, 2))
    made.discard_above(2, Version(2))
    made.safe(Rank(0), (Version(1), Version(2)), True, 2)
    made.safe(Rank(1), (Version(1),), True, 2)
    assert not made.protected  # a replaced rank 0 holds version 2 only, and its buddies soon do as well
    made.safe(Rank(1), (Version(2),), True, 2)
    assert made.protected


def test_reports_of_another_timeline_are_not_heard():
    made = commits((0, 1), (0,))
    made.discard_above(2, Version(0))
    made.safe(Rank(0), (Version(1),), True, 1)
    made.safe(Rank(1), (Version(1),), True, 1)
    made.safe(Rank(1), (Version(1),), True, 3)
    assert made.committed == 0
    assert not made.protected


def test_a_generation_begins_with_nothing():
    made = commits((7, 8), (7, 8))
    made.skipped(Rank(0), Version(9))
    made.begin(2)
    assert (made.committed, made.abandoned, made.protected) == (None, set(), False)


def test_all_may_have_to_go_back_behind_what_was_committed():
    made = commits((7, 8), (7, 8))
    made.discard_above(2, Version(7))
    assert made.committed == 7, "8 is made again, and is not to be overwritten before"


def test_of_very_many_abandoned_versions_those_are_told_that_somebody_holds():
    made = commits((0, 1), (0,))
    for version in range(1, 5000):
        made.skipped(Rank(1), Version(version))
    assert len(made.abandoned) <= MAX_TOLD
    assert made.abandoned > {4999, 4998}
    made.safe(Rank(1), (Version(0), Version(1)), True, 1)
    assert made.committed == 0, "what is no longer listed is abandoned all the same"
    made.safe(Rank(0), (Version(0), Version(4000)), True, 1)
    assert 4000 in made.abandoned


class Model:
    """The same by its definition, without counting."""

    def __init__(self, size):
        self.safe = [frozenset()] * size
        self.committed, self.abandoned = -1, set()

    def report(self, rank, versions):
        self.safe[rank] = frozenset(versions)
        for safe in self.safe:
            for version in frozenset.union(*self.safe) - safe:
                if version < max(safe, default=-1):
                    self.abandoned.add(version)
        common = frozenset.intersection(*self.safe) - self.abandoned
        self.committed = max(self.committed, *common, -1)
        self.abandoned = {version for version in self.abandoned if version > self.committed}


REPORTS = st.lists(
    st.tuples(st.integers(0, 2), st.sets(st.integers(0, 6), max_size=2), st.booleans(), st.integers(0, 9)), max_size=30
)


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(REPORTS)
def test_counting_finds_what_the_definition_says(reports):
    made, model = Commits(3), Model(3)
    for rank, versions, skips, skipped in reports:
        if skips:
            made.skipped(Rank(rank), Version(skipped))
            if skipped > model.committed:
                model.abandoned.add(skipped)
        else:
            made.safe(Rank(rank), tuple(map(Version, sorted(versions))), True, 0)
            model.report(rank, versions)
        assert (made.committed if made.committed is not None else -1) == model.committed
        assert made.abandoned == model.abandoned


def test_a_report_does_not_cost_more_in_a_larger_world():
    def seconds_a_report(size):
        made = Commits(size)
        steps = max(3, 16_000 // size)
        began = time.process_time()
        for step in range(steps):
            for rank in range(size):
                made.safe(Rank(rank), (Version(step), Version(step + 1)), True, 0)
        return (time.process_time() - began) / steps / size

    small, large = (min(seconds_a_report(size) for _ in range(2)) for size in (10, 8000))
    assert large < 20 * small, f"{small * 1e6:.1f} us, and {large * 1e6:.1f} us for 8000 ranks"
