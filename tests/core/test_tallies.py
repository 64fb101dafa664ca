"""What is counted on from state to state is what would be counted anew, whatever changes."""

from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.core.rows import Members, Seats, members_of, seats_of
from deadpool_run.core.state import Member, Seat
from deadpool_run.core.transitions import MemberPhase

MEMBERS = st.builds(
    Member,
    worker=st.integers(0, 5),
    node=st.sampled_from(["a", "b"]),
    phase=st.sampled_from(MemberPhase),
    since=st.floats(0, 9),
    rank=st.none() | st.integers(0, 3),
    stepped=st.booleans(),
)
SEATS = st.builds(
    Seat,
    rank=st.integers(0, 3),
    owner=st.none() | st.integers(0, 5),
    sealed=st.booleans(),
    done=st.booleans(),
    held=st.none() | st.just(frozenset({1})),
    node=st.sampled_from([None, "a", "b"]),
)


@given(st.lists(MEMBERS | st.integers(0, 5), max_size=30))
def test_members(changes):
    members = Members()
    for change in changes:
        before, known = members, dict(members)
        if isinstance(change, Member):
            members = members.having(change.worker, change)
        elif change in members:
            members = members.without(change)
        assert before == known, "a state that somebody holds was changed"
        assert members.tally == Members(members).tally


@given(st.lists(SEATS, max_size=30))
def test_seats(changes):
    seats = Seats(Seat(rank) for rank in range(4))
    for change in changes:
        before, known = seats, tuple(seats)
        seats = seats.having(change)
        assert before == known, "a state that somebody holds was changed"
        assert seats.tally == Seats(seats).tally
        kept = seats.tally.homes is before.tally.homes
        assert kept is (seats[change.rank].node == before[change.rank].node)


def test_any_mapping_and_any_tuple_will_do():
    member, seat = Member(1, "a", MemberPhase.READY, 0.0), Seat(0)
    assert members_of({1: member}).tally == Members({1: member}).tally
    assert set(seats_of((seat,)).tally.vacant) == {0}
    counted = Members({1: member})
    assert members_of(counted) is counted
