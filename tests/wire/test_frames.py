"""Bodies come out of a byte stream as they went in, however it is cut; what is too large is refused before it is held."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadpool_run.errors import ProtocolError
from deadpool_run.wire.frames import Frames, pack

LIMIT = 64


@settings(deadline=None)
@given(st.lists(st.binary(max_size=LIMIT), max_size=8), st.data())
def test_however_the_stream_is_cut(bodies, data):
    stream = b"".join(pack(body, LIMIT) for body in bodies)
    frames, found = Frames(LIMIT, bytes), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        found += frames.feed(stream[:cut])
        stream = stream[cut:]
    assert found == bodies


@settings(deadline=None)
@given(st.lists(st.binary(max_size=LIMIT), min_size=1, max_size=8))
def test_who_reads_only_what_is_missing_reads_nothing_of_the_next(bodies):
    stream = b"".join(pack(body, LIMIT) for body in bodies)
    at = 0
    for body in bodies:
        frames, found = Frames(LIMIT, bytes), []
        while not found:
            missing = frames.missing
            assert missing > 0
            found += frames.feed(stream[at : at + missing])
            at += missing
        assert found == [body]
    assert at == len(stream)


def test_a_frame_over_the_limit_is_refused_by_its_length_alone():
    with pytest.raises(ProtocolError, match="65"):
        list(Frames(LIMIT, bytes).feed(struct.pack(">I", LIMIT + 1)))
    with pytest.raises(ProtocolError, match="over the limit"):
        list(Frames(LIMIT, bytes).feed(b"GET / HTTP/1.1\r\n"))
    with pytest.raises(ProtocolError, match="over the limit"):
        pack(b"x" * (LIMIT + 1), LIMIT)


def test_those_before_it_are_still_told():
    frames, found = Frames(LIMIT, bytes), []
    with pytest.raises(ProtocolError):  # noqa: PT012 - what comes before the exception is what is looked at
        for body in frames.feed(pack(b"good", LIMIT) + struct.pack(">I", LIMIT + 1)):
            found.append(body)  # noqa: PERF402 - the exception comes after the first
    assert found == [b"good"]
