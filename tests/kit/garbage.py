"""Hostile input for decoders: random bytes, JSON of all kinds, and JSON that strains a decoder."""

import json

from hypothesis import strategies as st

PLAIN = st.none() | st.booleans() | st.integers() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text()
"""JSON values of any kind, with lone surrogates (`json.dumps` escapes them) and NaN."""

JSON = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)
DEEP = 20_000
"""More brackets than fit any stack."""
HARD = [
    b"",
    b"\xff\xfe{",
    b"\x00" * 20,
    b"[" * DEEP,
    b'{"type":' * DEEP,
    b"[" * DEEP + b"]" * DEEP,
    b'{"type":"' + b"\\ud800" * 100 + b'"}',
    b"1" * 10_000,
    b"-" + b"1" * 400,
    b"1e999",
    b'"\\ud800"',
    b"\xef\xbb\xbf{}",
    b'{"a":1,"a":[1]}',
    b"NaN",
]


def texts(parts=JSON):
    """Bytes that may be JSON of these parts."""
    return st.binary() | st.sampled_from(HARD) | parts.map(lambda each: json.dumps(each).encode())


def changed(example):
    """The JSON of a valid example with some of its values replaced."""
    good = json.loads(example)

    @st.composite
    def change(draw):
        return json.dumps(_changed(draw, good)).encode()

    return change()


def _changed(draw, value):
    if draw(st.integers(0, 6)) == 0:
        return draw(JSON)
    if isinstance(value, dict):
        found = {name: _changed(draw, each) for name, each in value.items() if draw(st.integers(0, 15))}
        return found | ({draw(st.text(max_size=3)): draw(JSON)} if draw(st.integers(0, 9)) == 0 else {})
    if isinstance(value, list):
        return [_changed(draw, each) for each in value]
    return value
