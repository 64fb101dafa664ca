"""After the greeting, nobody between two agents can change, drop, repeat or move a frame without being noticed."""

import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadpool_run.errors import ProtocolError, TamperedError
from deadpool_run.wire import peers
from deadpool_run.wire.frames import BUNDLE_BYTES, Frames, bundles, pack
from deadpool_run.wire.tags import KEY_BYTES, TAG_BYTES, Tagger

KEY = bytes(range(KEY_BYTES))
BODIES = [b"first", b"second", b"", b"second", b"last"]


def stream(bodies=BODIES, key=KEY):
    """The frames with their tags, each as it is sent."""
    tagger = Tagger(key)
    return [frame + tagger.tag(frame) for frame in (pack(body, 100) for body in bodies)]


def read(pieces, key=KEY):
    frames, found = Frames(100, bytes, Tagger(key)), []
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
    data, frames, found = b"".join(stream()), Frames(100, bytes, Tagger(KEY)), []
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
    frames, found = Frames(100, bytes, Tagger(KEY)), []
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
    frames = Frames(100, decoded.append, Tagger(KEY))
    with pytest.raises(TamperedError):
        list(frames.feed(pack(b"forged", 100) + bytes(TAG_BYTES)))
    assert not decoded


def test_a_message_of_agents_with_its_tag_is_read_by_the_format():
    tagger, message = Tagger(KEY), peers.PreemptionNotice()
    frame = peers.encode(message)
    assert list(peers.FORMAT.frames(Tagger(KEY)).feed(frame + tagger.tag(frame))) == [message]


# --- bundles: frames that are written together share a tag ---------------------------------------------------------


def bundled(bodies=BODIES, tagger=None):
    """The bytes of frames that are written together."""
    tagger = tagger or Tagger(KEY)
    return b"".join(piece + tagger.tag(piece) for piece in bundles(pack(body, 1 << 20) for body in bodies))


def test_frames_that_are_written_together_share_a_tag():
    frames = b"".join(pack(body, 100) for body in BODIES)
    assert len(bundled()) == 4 + len(frames) + TAG_BYTES
    assert bundled([b"alone"]) == stream([b"alone"])[0]
    tagger = Tagger(KEY)
    assert read([bundled(tagger=tagger), bundled([b"alone"], tagger), bundled(tagger=tagger)]) == [
        *BODIES,
        b"alone",
        *BODIES,
    ]


@given(
    st.lists(
        st.sampled_from([0, 1, 100, BUNDLE_BYTES - 9, BUNDLE_BYTES - 4, BUNDLE_BYTES, 2 * BUNDLE_BYTES]), max_size=5
    ),
    st.data(),
)
def test_a_bundle_holds_what_fits_and_larger_frames_go_alone(sizes, data):
    bodies = [bytes([at % 256]) * size for at, size in enumerate(sizes)]
    pieces = list(bundles(pack(body, 1 << 20) for body in bodies))
    assert all(len(piece) <= 4 + BUNDLE_BYTES for piece in pieces if piece[0] & 0x80)
    sent, frames, found = bundled(bodies), Frames(1 << 20, bytes, Tagger(KEY)), []
    while sent:
        cut = data.draw(st.integers(1, len(sent)))
        found += frames.feed(sent[:cut])
        sent = sent[cut:]
    assert found == bodies


def test_nothing_of_a_bundle_is_decoded_before_its_last_byte_has_come():
    data, frames = bundled(), Frames(100, bytes, Tagger(KEY))
    assert [list(frames.feed(bytes([byte]))) for byte in data] == [*[[]] * (len(data) - 1), BODIES]


@given(st.integers(min_value=0), st.integers(1, 255))
def test_a_changed_byte_of_a_bundle_spoils_all_of_it(place, change):
    data = bytearray(bundled())
    data[place % len(data)] ^= change
    frames, found = Frames(100, bytes, Tagger(KEY)), []
    with suppress(ProtocolError):
        found.extend(frames.feed(bytes(data)))
    assert not found


@pytest.mark.parametrize(
    ("content", "why"),
    [
        pytest.param(pack(b"whole", 100) + b"\0\0", "within a frame", id="half a length"),
        pytest.param(pack(b"whole", 100) + pack(b"half", 100)[:-1], "ends after its bundle", id="half a frame"),
        pytest.param(pack(b"whole", 100) + pack(bytes(101), 101), "over the limit of 100", id="a frame over the limit"),
        pytest.param(bytes(BUNDLE_BYTES + 1), f"over the limit of {BUNDLE_BYTES}", id="over the limit"),
    ],
)
def test_a_bundle_that_is_none_is_refused(content, why):
    piece = struct.pack(">I", 1 << 31 | len(content)) + content
    frames, found = Frames(100, bytes, Tagger(KEY)), []
    with pytest.raises(ProtocolError, match=why):  # noqa: PT012 - what comes before the exception is what is looked at
        for body in frames.feed(piece + Tagger(KEY).tag(piece)):
            found.append(body)  # noqa: PERF402 - the exception comes after the first
    assert found == ([b"whole"] if content.startswith(pack(b"whole", 100)) else [])


def test_without_a_tagger_there_are_no_bundles():
    (piece,) = bundles([pack(b"one", 100), pack(b"two", 100)])
    with pytest.raises(ProtocolError, match="over the limit"):
        list(Frames(100, bytes).feed(piece))
