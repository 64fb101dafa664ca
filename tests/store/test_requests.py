"""Requests are cut from their stream wherever it is broken, and whatever else comes is one error."""

import re
import struct
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.errors import ProtocolError
from deadpool_run.store.requests import MAX_KEYS, Query, Request, RequestStream

HELLO = struct.pack("=BI", Query.VALIDATE, 0x3C85F7CE)
TORCH = Path(torch.__file__).parent / "include/torch/csrc/distributed/c10d"


def sized(data):
    return struct.pack("=Q", len(data)) + data


def listed(keys):
    return struct.pack("=Q", len(keys)) + b"".join(map(sized, keys))


STREAM = {
    Request(Query.PING, number=7): struct.pack("=I", 7),
    Request(Query.SET, (b"key",), (b"value",)): sized(b"key") + sized(b"value"),
    Request(Query.COMPARE_SET, (b"key",), (b"", b"new")): sized(b"key") + sized(b"") + sized(b"new"),
    Request(Query.ADD, (b"n",), number=-3): sized(b"n") + struct.pack("=q", -3),
    Request(Query.BARRIER, (b"b",), number=2): sized(b"b") + struct.pack("=q", 2),
    Request(Query.WAIT, (b"a", b"b")): listed([b"a", b"b"]),
    Request(Query.MULTI_GET, tuple(b"k%d" % each for each in range(40))): listed([b"k%d" % each for each in range(40)]),
    Request(Query.MULTI_SET, (b"a", b"b"), (b"1", b"2")): struct.pack("=Q", 2)
    + b"".join(map(sized, (b"a", b"1", b"b", b"2"))),
    Request(Query.CHECK): listed([]),
    Request(Query.CANCEL_WAIT): b"",
    Request(Query.QUEUE_POP, (b"q",)): sized(b"q"),
}
BYTES = HELLO + b"".join(bytes([request.query]) + fields for request, fields in STREAM.items())


@given(st.lists(st.integers(0, len(BYTES)), max_size=30))
def test_a_stream_may_be_broken_anywhere(places):
    stream, seen = RequestStream(), []
    for begin, end in pairwise([0, *sorted(places), len(BYTES)]):
        seen += stream.feed(BYTES[begin:end])
    assert seen == list(STREAM)


def test_every_byte_may_come_alone_and_long_streams_are_no_trouble():
    stream, seen = RequestStream(), []
    seen += stream.feed(HELLO)
    for begin in range(0, 400 * (len(BYTES) - len(HELLO)), 1000):
        seen += stream.feed((BYTES[len(HELLO) :] * 400)[begin : begin + 1000])
    assert seen == list(STREAM) * 400


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_requests_or_one_error(data, begun):
    stream = RequestStream()
    with suppress(ProtocolError):
        for each in stream.feed((HELLO if begun else b"") + data):
            assert isinstance(each, Request)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        struct.pack("=BI", Query.VALIDATE, 1),
        HELLO + HELLO,
        HELLO + bytes([len(Query)]),
        HELLO + struct.pack("=BQ", Query.GET, 1 << 40),
        HELLO + bytes([Query.SET]) + sized(b"key") + struct.pack("=Q", 1 << 40),
        HELLO + struct.pack("=BQ", Query.WAIT, MAX_KEYS + 1),
    ],
)
def test_what_is_no_request_is_refused(data):
    with pytest.raises(ProtocolError):
        RequestStream().feed(data)


def test_the_names_and_numbers_are_those_of_this_torch():
    (header,) = TORCH.rglob("TCPStoreBackend.hpp")
    text = header.read_text()
    names = re.search(r"enum class QueryType : uint8_t \{(.*?)\}", text, re.DOTALL)
    assert [name.strip() for name in names[1].split(",") if name.strip()] == [query.name for query in Query]
    assert re.search(r"validationMagicNumber = (\w+)", text)[1] == "0x3C85F7CE"
