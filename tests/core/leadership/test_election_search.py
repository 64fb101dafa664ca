"""The election's invariants hold in every schedule that the search tries, and the search finds planted mistakes."""

import random
import secrets
import sys
import time

import election_search
import pytest
from election_model import Broken
from election_planted import PLANTED, Planted
from election_search import MIXES, MOST, STARTS, Search, found

QUICK_S = 1.5
SLOW_S = 6.0
SMALL = ("three", "one grows to three", "three shrink to two", "two with an authority")
"""Starts from which every single fault can be tried in a minute."""
SINGLE = frozenset({"end", "reset", "cut", "sleep", "hold"})


def searched(start, mix, seed, seconds, *, most):
    """Return a search that tried schedules for so much CPU time; the seed of a bad one is in its message."""
    search = Search(frozenset(MIXES[mix]))
    end = time.process_time() + seconds
    while time.process_time() < end:
        seed += 1
        try:
            search.walk(STARTS[start](), random.Random(seed), most)
        except Broken as broken:
            raise Broken(f"{broken} (start {start!r}, {mix}, seed {seed}, at most {most} faults)") from broken
    print(f"{start}, {mix}: {search.runs} schedules, {search.steps} steps up to seed {seed}")
    return search


@pytest.mark.parametrize("start", STARTS)
def test_no_schedule_breaks_an_invariant(start):
    search = searched(start, "everything", 0, QUICK_S, most=4)
    assert search.runs > 10
    assert search.steps > 1_000


def searched_once(start, bound):
    """Return a search that tried single faults at every state, in random order, until it had seen so many states."""
    search = Search(SINGLE, bound=bound)
    search.once(STARTS[start](), seed=1)
    print(f"{start}: {search.runs} schedules, {len(search.seen)} states, {search.steps} steps")
    return search


@pytest.mark.parametrize("start", ["three", "one grows to three", "three shrink to two"])
def test_of_many_single_faults_none_breaks_an_invariant(start):
    assert len(searched_once(start, 6_000).seen) > 2_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("start", SMALL)
def test_no_single_fault_breaks_an_invariant(start):
    """Every fault of these kinds at every state of the unfailed schedule: this search is exhaustive."""
    assert len(searched_once(start, sys.maxsize).seen) > 2_000


def test_a_pause_of_all_machines_and_closed_connections_cost_nothing():
    search = Search(frozenset({"all", "reset", "order"}), calm=True)
    start = found(3)
    search.walks(start, range(60), 2)
    assert search.steps > 10_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("start", STARTS)
def test_no_schedule_of_a_long_search_breaks_an_invariant(start, mix):
    search = searched(start, mix, secrets.randbits(32), SLOW_S, most=MOST)
    assert search.steps > 10_000


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name)
def test_the_search_finds_a_planted_mistake(planted: Planted, monkeypatch: pytest.MonkeyPatch):
    start = STARTS[planted.start]()
    for where, name, mistake in planted.patches:
        monkeypatch.setattr(where, name, mistake)
    search = Search(frozenset(planted.kinds), calm=planted.calm)
    with pytest.raises(Broken) as broken:
        search.walks(start, range(planted.tries), planted.most)
    print(f"{planted.name}: {search.runs} schedules, {search.steps} steps: {broken.value}")
    assert str(broken.value)[0] in planted.breaks


def test_the_kinds_of_faults_are_known():
    assert {kind for mix in MIXES.values() for kind in mix} <= election_search.KINDS
