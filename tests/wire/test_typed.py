"""Numbers are checked all at once, and yet each of them."""

import json

import pytest

from deadpool_run.core.events import NodeResynced, Place, WorkerFound
from deadpool_run.core.members import Member, Seat
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import peers, typed


def heartbeat_ack(rank_entries):
    parts = json.loads(peers.encode(peers.HeartbeatAck(1, 0.5, 2))[4:]) | {"rank_entries": rank_entries}
    return peers.decode(json.dumps(parts).encode())


def test_numbers_come_back_as_they_were():
    assert heartbeat_ack([[0, -1, 1 << 62], [], [7]]).rank_entries == ((0, -1, 1 << 62), (), (7,))
    assert heartbeat_ack([]).rank_entries == ()


@pytest.mark.parametrize("wrong", [True, False, 1.0, 1e300, "1", None, [1], {}])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_that_is_no_number_among_many_is_refused(wrong, at):
    rank_entry = [1, 2, 3]
    rank_entry[at] = wrong
    with pytest.raises(ProtocolError):
        heartbeat_ack([[4, 5, 6], rank_entry])


@pytest.mark.parametrize("rank_entries", [[1], "12", {"0": [1]}, [[1], 2], [[1], "2"], [{"0": 1}], 3, None])
def test_what_is_no_row_of_numbers_is_refused(rank_entries):
    with pytest.raises(ProtocolError):
        heartbeat_ack(rank_entries)


@pytest.mark.parametrize(
    "changed",
    [
        {"node": 1},
        {"versions": [1]},
        {"discarded": [1]},
        {"discarded": [1, 2, 3]},
        {"discarded": [1, "2"]},
        {"workers": [{}]},
        {"workers": [[1, 2]]},
        {"workers": [{**typed.plain(WorkerFound(1, 2)), "pid": "2"}]},
        {"workers": [{**typed.plain(WorkerFound(1, 2)), "code": 1.5}]},
    ],
)
def test_what_is_wrong_deep_within_is_refused(changed):
    kinds = {"NodeResynced": NodeResynced}
    parts = {"type": "NodeResynced", "node": "n", "workers": [], "discarded": [0, -1], **changed}
    with pytest.raises(ProtocolError):
        typed.decode(kinds, parts)


def test_a_state_comes_back_as_it_was():
    state = State(
        phase=JobPhase.RUNNING,
        capture_interval=1,
        seats=(Seat(0, owner=3, held=frozenset({1, 2}), copies={"n1": frozenset({1})}), Seat(1)),
        members={3: Member(3, "n0", MemberPhase.RUNNING, 0.5, rank=0)},
        leaves={"n0": "", None: "x"},
        buddies=(("n1",), ()),
    )
    assert typed.build(State, json.loads(json.dumps(typed.plain(state)))) == state


def test_a_class_with_one_field_and_one_with_none():
    assert typed.encode(peers.PreemptionNotice()) == {"type": "PreemptionNotice"}
    assert typed.encode(peers.Void("a")) == {"type": "Void", "attempt": "a"}
    assert typed.plain(Place("n"))["name"] == "n"
