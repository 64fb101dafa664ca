"""Decoders of bytes from outside give a value or their one declared error."""

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.garbage import DEEP, HARD, JSON, changed, texts

from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import NodeId
from deadpool_run.wire import auth, messages, peers, typed
from deadpool_run.wire.frames import BUNDLE_BYTES, Frames
from deadpool_run.wire.tags import Tagger

FORMATS = {"auth": auth.FORMAT, "messages": messages.FORMAT, "peers": peers.FORMAT}
PLACE = ev.Place("n", "10.0.0.1", 29400, "rack", 3)
GOOD = {
    "auth": [auth.Hello(auth.VERSION, auth.ConnectionRole.MEMBER, "00"), auth.Proof("a", "b", "c", "d")],
    "messages": [
        messages.Assign(rank=1, local_rank=0, epoch=1, env={"A": "b"}, fds=("status_page",)),
        messages.Captured(3),
        do.AbortStep(worker=1, epoch=2),
    ],
    "peers": [
        peers.Join(PLACE, {"script": "x"}),
        peers.Rejoin(NodeId("n"), PLACE, ev.NodeResynced("n", (ev.WorkerFound(1, 2),))),
        peers.Joined(NodeId("n"), "id", "name", Settings(world_size=2), None),
        peers.HeartbeatAck(1, 0.5, 2, rank_entries=((0, 1), (2, 3))),
        peers.LogState(1, 2, 0.5, b"part", is_last=True),
        peers.LogEntries(1, 2, (peers.LogEntry(0.5, ev.NodeJoined("n", PLACE)),)),
        peers.Order(do.AbortStep(worker=1, epoch=2), 1),
    ],
}
CHANGED = [(name, message) for name, all_of_them in GOOD.items() for message in all_of_them]


@pytest.mark.parametrize("name", FORMATS)
@given(texts())
def test_any_bytes_are_a_message_or_one_error(name, body):
    with suppress(ProtocolError):
        FORMATS[name].decode(body)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("body", HARD)
def test_what_is_hard_to_decode_is_one_error(name, body):
    with pytest.raises(ProtocolError):
        FORMATS[name].decode(body)


@pytest.mark.parametrize(("name", "message"), CHANGED, ids=lambda each: type(each).__name__)
@given(st.data())
def test_a_message_with_other_values_is_a_message_or_one_error(name, message, data):
    body = data.draw(changed(FORMATS[name].encode(message)[4:]))
    with suppress(ProtocolError):
        found = FORMATS[name].decode(body)
        FORMATS[name].encode(found)


@given(st.lists(st.binary(max_size=60), max_size=8), st.booleans())
@example([b"\xff\xff\xff\xff"], False)
@example([b"\0\0\0\0", b"\0\0\0\0" + bytes(16)], True)
@example([b"\x80\0\0\0"], False)
@example([b"\x80\1\0\0", b"\0\0\0\0"], True)
def test_any_stream_is_cut_into_messages_or_one_error(pieces, tagged):
    frames = Frames(50, bytes, Tagger(bytes(32)) if tagged else None)
    with suppress(ProtocolError):
        for piece in pieces:
            for body in frames.feed(piece):
                assert len(body) <= 50
            assert frames.missing > 0
            assert len(frames._bytes) <= 4 + (BUNDLE_BYTES if tagged else 50) + 16 + len(piece)


@given(st.lists(texts(), max_size=3))
@example([b'{"nodes":' * DEEP])
def test_any_parts_are_a_state_or_one_error(parts):
    with suppress(ProtocolError):
        assert isinstance(peers.state_of(parts), State)


@given(texts())
def test_any_text_is_json_or_one_error(text):
    with suppress(ProtocolError):
        typed.parse(text)


@given(JSON)
@example({"world_size": 1 << 200})
@example({"world_size": float("inf")})
def test_any_parts_are_an_object_or_one_error(parts):
    with suppress(ProtocolError):
        typed.from_plain(Settings, parts)


@given(texts())
def test_any_file_is_an_object_or_empty(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "object.json"
    path.write_bytes(text)
    assert isinstance(typed.read_object(path), dict)
