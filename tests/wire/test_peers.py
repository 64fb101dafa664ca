"""Messages between agents survive encoding. Any other bytes are refused."""

import json
from typing import get_args

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from kit.messages import register
from msgspec import Raw

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings
from deadpool_run.errors import ProtocolError
from deadpool_run.wire import peers
from deadpool_run.wire.typed import to_json

register()

MESSAGES = get_args(peers.Message)
CALM = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_every_message_comes_back_as_it_was(kind):
    @CALM
    @given(_of(kind))
    def check(message):
        assert peers.decode(peers.encode(message)[4:]) == message

    check()


def _of(kind):
    """A message; where its fields are JSON of anything, of anything that JSON knows."""
    a_job = Settings(world_size=2)
    free = {
        peers.Ask: {"request": st.dictionaries(st.text(), JSON, max_size=3)},
        peers.Joined: {"settings": st.just(a_job)},
        peers.Answer: {"answer": st.dictionaries(st.text(), JSON, max_size=3).map(to_json).map(Raw)},
    }
    return st.builds(kind, **free[kind]) if kind in free else st.from_type(kind)


@CALM
@given(st.one_of(*map(st.from_type, get_args(ev.Event))))
def test_a_fact_within_a_message_comes_back_as_it_was(event):
    assert peers.decode(peers.encode(peers.Fact(event))[4:]) == peers.Fact(event)


@CALM
@given(st.one_of(*map(st.from_type, get_args(do.Effect))))
def test_an_order_within_a_message_comes_back_as_it_was(effect):
    order = peers.Order(effect, 1, peers.Peer("n", "10.0.0.1", 7))
    assert peers.decode(peers.encode(order)[4:]) == order


@given(st.binary() | JSON.map(lambda parts: json.dumps(parts).encode()))
@example(b"")
@example(b"{}")
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"9" * 10_000)
@example(b'"\xff"')
@example(b'{"type":"HeartbeatAck","term":1,"sent_at":0,"configuration":1,"rank_entries":{}}')
@example(b'{"type":"HeartbeatAck","term":1,"sent_at":0,"configuration":1,"rank_entries":[[1.5]]}')
@example(b'{"type":"HeartbeatAck","term":1,"sent_at":0,"configuration":1,"rank_entries":[[true]]}')
@example(b'{"type":"HeartbeatAck","term":1,"sent_at":0,"configuration":1,"rank_entries":"12"}')
@example(b'{"type":"HeartbeatAck"}')
@example(b'{"type":"HeartbeatAck","term":1,"sent_at":null,"configuration":1}')
@example(b'{"type":"Peer","node":"n","address":"a","port":1}')
@example(b'{"type":{},"event":[]}')
@example(b'{"type":"Fact","event":[]}')
@example(b'{"type":"Fact","event":null}')
@example(b'{"type":"Fact","event":"type"}')
@example(b'{"type":"Buddies","mine":[],"keep":[]}')
@example(b'{"type":"Buddies","mine":{"0":[["node","address","port"]]},"keep":[]}')
@example(
    b'{"type":"Order","effect":{"type":"BeginGeneration","generation":1},"capture_interval":1,"source":["node","address","port"]}'
)
@example(b'{"type":"Order","effect":{"type":"BeginGeneration","generation":1},"capture_interval":1,"source":"node"}')
@example(b'{"type":"Join","place":["name","address","port","leaf","order"],"nproc_per_node":1}')
@example(b'{"type":"End","exit_code":true,"reason":""}')
def test_what_is_no_message_is_refused(body):
    with pytest.raises(ProtocolError):
        peers.decode(body)


@given(
    st.dictionaries(st.text(), JSON) | st.builds(dict, type=st.sampled_from(["WorkerExited", "NodeJoined"]), place=JSON)
)
@example({"type": "WorkerExited", "worker": 1, "code": None, "signal": 9, "captured": {"4": 5}})
@example({"type": "WorkerStarted", "worker": True, "pid": 1})
@example({"type": "WorkerStarted", "worker": 1.0, "pid": 1})
@example({"type": "KillRequested", "rank": 1, "how": ["sigkill"]})
@example({"type": "KillRequested", "rank": 1, "how": {"a": 1}})
@example({"type": "NodeJoined", "node": "n", "place": "name"})
@example({"type": "NodeJoined", "node": "n", "place": ["name", "address", "port", "leaf", "order"]})
@example({"type": "TerminateWorker", "worker": 1, "signal": 15, "grace_s": True})
def test_what_is_no_fact_and_no_order_is_refused(parts):
    for message in ({"type": "Fact", "event": parts}, {"type": "Order", "effect": parts, "capture_interval": 1}):
        with pytest.raises(ProtocolError):
            peers.decode(json.dumps(message).encode())


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
def test_a_message_with_one_value_changed_is_a_message_or_refused(kind):
    """Any value of a field is accepted or refused, and an accepted message can be encoded again."""

    @CALM
    @given(_of(kind), st.data())
    def check(message, data):
        parts = json.loads(peers.encode(message)[4:])
        at = data.draw(st.sampled_from(sorted(parts)))
        parts[at] = data.draw(JSON)
        try:
            found = peers.decode(json.dumps(parts).encode())
        except ProtocolError:
            return
        assert peers.encode(peers.decode(peers.encode(found)[4:])) == peers.encode(found)

    check()


def test_a_message_over_the_limit_is_not_sent():
    with pytest.raises(ProtocolError):
        peers.encode(peers.Evict("x" * peers.MAX_FRAME_BYTES))
