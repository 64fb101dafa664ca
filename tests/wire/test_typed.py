"""JSON is decoded to what was encoded, and refused for any value that is wrong, however deep."""

import json
import subprocess
import sys

import pytest

from deadpool_run.core.events import Event, Place, TimeAdvanced, WorkerFound, WorkerRaised
from deadpool_run.core.members import Member, Seat
from deadpool_run.core.state import Move, State
from deadpool_run.core.transitions import JobPhase, MemberPhase
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import peers, typed

EVENTS = typed.Decoder(Event, "an event")


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
        {"workers": [{**typed.to_plain(WorkerFound(1, 2)), "pid": "2"}]},
        {"workers": [{**typed.to_plain(WorkerFound(1, 2)), "code": 1.5}]},
    ],
)
def test_what_is_wrong_deep_within_is_refused(changed):
    parts = {"type": "NodeResynced", "node": "n", "workers": [], "discarded": [0, -1], **changed}
    with pytest.raises(ProtocolError):
        EVENTS.decode(json.dumps(parts).encode())


def test_a_state_comes_back_as_it_was():
    state = State(
        phase=JobPhase.RUNNING,
        capture_interval=1,
        seats=(Seat(0, owner=3, held=frozenset({1, 2}), copies={"n1": frozenset({1})}), Seat(1)),
        members={3: Member(3, "n0", MemberPhase.RUNNING, 0.5, rank=0)},
        failure_domains={"n0": ""},
        buddies=(("n1",), ()),
    )
    assert typed.Decoder(State, "a state").decode(typed.to_json(state)) == state
    assert typed.from_plain(State, json.loads(json.dumps(typed.to_plain(state)))) == state


def test_facts_that_wait_in_a_state_keep_their_classes():
    move = Move(1.0, "n0", {"n1"}, deferred=[TimeAdvanced(), WorkerRaised(1, None, "E", "", "")])
    state = State(phase=JobPhase.RUNNING, capture_interval=1, seats=(), move=move)
    assert typed.Decoder(State, "a state").decode(typed.to_json(state)).move == move


@pytest.mark.parametrize("text", ["\udcff", "a\ud800b", "\udcffé😀"])
def test_text_with_lone_surrogates_comes_back_as_it_was(text):
    raised = WorkerRaised(1, None, "ValueError", text, text)
    assert EVENTS.decode(typed.to_json(raised)) == raised


def test_a_large_integer_comes_back_as_it_was():
    asked = peers.Ask(1, {"rank": 1 << 70})
    assert peers.decode(peers.encode(asked)[4:]) == asked


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b'{"type":"WorkerStarted","worker":1,"pid":"2"}', "WorkerStarted.*pid"),
        (b'{"type":"WorkerStarted","worker":1}', "WorkerStarted.*pid"),
        (b'{"type":"WorkerStarted","worker":1,"pid":2,"more":3}', "WorkerStarted.*more"),
        (b'{"type":"WorkerRaised","worker":1,"text":"\\udcff"}', "WorkerRaised.*text"),
        (b'{"type":"Nonsense"}', "Nonsense"),
        (b"nonsense", "nonsense"),
    ],
)
def test_an_error_names_the_class_and_the_field(text, named):
    with pytest.raises(ProtocolError, match=f"not an event: .*{named}"):
        EVENTS.decode(text)


def test_a_class_with_one_field_and_one_with_none():
    assert typed.to_plain(peers.PreemptionNotice()) == {"type": "PreemptionNotice"}
    assert typed.to_plain(peers.Void("a")) == {"type": "Void", "attempt": "a"}
    assert typed.to_plain(Place("n"))["name"] == "n"


THREADS = """
import dataclasses, sys, threading
from deadpool_run.wire.typed import from_plain

sys.setswitchinterval(1e-6)
PART = {f"field{n}": n for n in range(20)}
WHOLE = dict.fromkeys(PART, PART)
for _ in range(200):
    part = dataclasses.make_dataclass("Part", [(name, int) for name in PART])
    whole = dataclasses.make_dataclass("Whole", [(name, part) for name in WHOLE])
    together = threading.Barrier(4)
    threads = [threading.Thread(target=lambda: (together.wait(), from_plain(whole, WHOLE))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("done")
"""
"""Converts classes for the first time in several threads at once, as a checkpointer does with the manifests of its ranks."""


def test_threads_may_convert_to_a_class_for_the_first_time_at_once():
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
