"""After the greeting, nobody between two agents can change, drop, repeat or move a frame without being noticed."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.errors import ProtocolError, TamperedError
from deadpool_run.wire import peers
from deadpool_run.wire.frames import Frames, pack
from deadpool_run.wire.seal import KEY_BYTES, TAG_BYTES, Seal

KEY = bytes(range(KEY_BYTES))
BODIES = [b"first", b"second", b"", b"second", b"last"]


def stream(bodies=BODIES, key=KEY):
    """The frames with their tags, each as it is sent."""
    seal = Seal(key)
    return [frame + seal.tag(frame) for frame in (pack(body, 100) for body in bodies)]


def read(pieces, key=KEY):
    frames, found = Frames(100, bytes, Seal(key)), []
    for piece in pieces:
        found += frames.feed(piece)
    return found


def test_what_was_sent_comes_as_it_was():
    assert read(stream()) == BODIES


def test_it_does_not_matter_in_which_pieces_it_comes():
    data = b"".join(stream())
    assert read(bytes([byte]) for byte in data) == BODIES
    assert read([data]) == BODIES


def test_a_reader_that_may_not_read_too_much_knows_how_much_is_missing():
    data, frames, found = b"".join(stream()), Frames(100, bytes, Seal(KEY)), []
    while data:
        missing = frames.missing
        assert 0 < missing <= len(data)
        found += frames.feed(data[:missing])
        data = data[missing:]
    assert found == BODIES


@given(st.integers(min_value=0), st.integers(1, 255))
def test_a_changed_byte_is_noticed(place, change):
    data = bytearray(b"".join(stream()))
    data[place % len(data)] ^= change
    frames, found = Frames(100, bytes, Seal(KEY)), []
    with suppress(ProtocolError):  # or a length has grown: the rest is waited for
        found.extend(frames.feed(bytes(data)))
    assert found == BODIES[: len(found)]
    assert len(found) < len(BODIES)


@pytest.mark.parametrize(
    "order",
    [
        pytest.param([1, 2, 3, 4], id="the first dropped"),
        pytest.param([0, 2, 3, 4], id="one dropped"),
        pytest.param([0, 0, 1, 2], id="repeated"),
        pytest.param([0, 1, 2, 1], id="repeated later"),
        pytest.param([0, 2, 1, 3], id="moved"),
        pytest.param([0, 3], id="an equal one, earlier"),
    ],
)
def test_a_frame_that_does_not_come_in_its_turn_is_noticed(order):
    pieces = stream()
    with pytest.raises(TamperedError, match="altered, lost, repeated or moved"):
        read(pieces[each] for each in order)


def test_a_frame_of_another_connection_is_noticed():
    with pytest.raises(TamperedError):
        read(stream(key=bytes(KEY_BYTES)))


def test_nothing_is_decoded_whose_tag_is_wrong():
    decoded = []
    frames = Frames(100, decoded.append, Seal(KEY))
    with pytest.raises(TamperedError):
        list(frames.feed(pack(b"forged", 100) + bytes(TAG_BYTES)))
    assert not decoded


def test_a_message_of_agents_with_its_tag_is_read_by_the_format():
    seal, message = Seal(KEY), peers.PreemptionNotice()
    frame = peers.encode(message)
    assert list(peers.FORMAT.frames(Seal(KEY)).feed(frame + seal.tag(frame))) == [message]
