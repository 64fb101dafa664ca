"""A mapping on shelves is what a dict is, whoever holds an older one keeps it, and two share what they have in common."""

from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.core.changes import changed
from deadpool_run.core.shelves import ByNode, Draft, Shelves, Times
from deadpool_run.core.state import Seat

NUMBERS = st.integers(0, 3 << 20)
CHANGES = st.lists(st.tuples(st.sampled_from(["put", "drop"]), st.integers(0, 400), st.integers(0, 3)), max_size=40)


@given(st.dictionaries(NUMBERS, st.integers(), max_size=300), CHANGES)
def test_it_is_what_a_dict_is(entries, changes):
    shelves, expected = Shelves(entries), dict(entries)
    for what, key, value in changes:
        before, known = shelves, dict(expected)
        if what == "put":
            shelves, expected[key] = shelves.having(key, value), value
        elif key in expected:
            shelves = shelves.without(key)
            del expected[key]
        assert before == known, "what somebody holds was changed"
        assert shelves == expected
        assert len(shelves) == len(expected)
        assert shelves.get(key, "none") == expected.get(key, "none")
        assert (key in shelves) == (key in expected)
        assert set(shelves.differing(before)) == {
            k for k in {*known, *expected} if known.get(k, "none") != expected.get(k, "none")
        }
    assert None not in shelves
    assert "n1" not in shelves


@given(st.dictionaries(NUMBERS, st.integers()), st.dictionaries(NUMBERS, st.integers()))
def test_many_changes_are_the_same_as_one_by_one(entries, changes):
    together = one_by_one = Shelves(entries)
    for key, value in changes.items():
        one_by_one = one_by_one.having(key, value)
    assert together.having_all(changes) == one_by_one == {**entries, **changes}
    assert list(together.having_all(changes)) == list(one_by_one)
    assert together == entries


def test_a_change_copies_one_shelf_of_very_many():
    before = Shelves((number, None) for number in range(100_000))
    after = before.having(77_777, None)
    own = [at for at, shelf in after._shelves.items() if shelf is not before._shelves[at]]
    assert len(own) == 1
    assert len(after._shelves[own[0]]) <= 128
    assert list(after.differing(before)) == []


def test_by_node():
    nodes = ByNode({f"n{at}": at for at in range(1000)})
    assert dict(nodes.having("n5", 6)) == {**{f"n{at}": at for at in range(1000)}, "n5": 6}
    assert set(nodes.without("n7").differing(nodes)) == {"n7"}
    assert max(map(len, nodes._shelves.values())) < 40


@given(st.lists(st.floats(0, 100, allow_nan=False), min_size=1, max_size=50))
def test_times(points):
    times = Times()
    for at in points:
        times = times.one_more(at)
    for done, at in enumerate(points):
        assert times.first == min(points[done:])
        times = times.one_less(at)
    assert not times


def test_a_draft_looks_up_what_it_has_not():
    draft = Draft({1: "a", 2: "b"}.__getitem__)
    draft[1] = "c"
    assert (draft[1], draft[2], dict(draft)) == ("c", "b", {1: "c"})


def test_changed_is_what_replace_makes():
    seat = Seat(3, owner=7)
    assert changed(seat, owner=None, node="n1") == Seat(3, node="n1")
    assert seat == Seat(3, owner=7)
