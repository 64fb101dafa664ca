"""The transcript as a file format and as a player; no processes."""

import contextlib
import hashlib
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.garbage import JSON, texts

from deadpool_run.errors import PeerLostError, SnapshotError
from deadpool_run.worker.transcript import transcript as transcript_module
from deadpool_run.worker.transcript.transcript import _MAGIC, MAX_FLOAT_BYTES, Transcript

KINDS = [
    torch.tensor([1, -2, 3]),
    torch.tensor(True),
    torch.tensor([[1.5, float("nan")]], dtype=torch.bfloat16),
    torch.tensor([1 + 2j], dtype=torch.complex64),
    torch.empty(0, 3, dtype=torch.uint8),
    torch.arange(12, dtype=torch.int16).view(3, 4).t(),
]


def recorded(*collectives):
    transcript = Transcript()
    for group, name, outputs in collectives:
        transcript.fill(transcript.reserve(group, name, outputs), outputs)
    return transcript


def test_every_kind_of_tensor_comes_back():
    played = Transcript.from_bytes(recorded(("0", "allgather", KINDS)).to_bytes())
    outputs = [torch.zeros_like(tensor) for tensor in KINDS]
    assert played.play("0", "allgather", outputs) is not None
    for output, tensor in zip(outputs, KINDS, strict=True):
        assert torch.equal(output.nan_to_num(7), tensor.nan_to_num(7))
    assert played.misses == 0


def test_what_was_received_is_kept_as_it_was():
    tensor = torch.tensor([1, 2])
    transcript = recorded(("0", "broadcast", [tensor]))
    tensor.zero_()
    played = Transcript.from_bytes(transcript.to_bytes())
    played.play("0", "broadcast", [tensor])
    assert tensor.tolist() == [1, 2]


def test_a_thread_of_the_script_has_entries_of_its_own_which_may_end_anywhere():
    number = torch.tensor([1])
    transcript = recorded(("0", "allreduce", [number]))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: transcript.fill(transcript.reserve("0", "allreduce", [number]), [number + 1])).result()
        pool.submit(transcript.reserve, "0", "allreduce", [number]).result()  # not complete when the recording ends
        played = Transcript.from_bytes(transcript.to_bytes())
        mine, threads = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        pool.submit(played.play, "0", "allreduce", [threads]).result()
        for name in ("allreduce", "barrier"):  # the second was not issued
            with pytest.raises(PeerLostError, match="first process of the rank had not received it"):
                pool.submit(played.play, "0", name, [threads]).result()
    played.play("0", "allreduce", [mine])
    assert (mine.tolist(), threads.tolist()) == ([1], [2])
    assert (played.misses, played.left) == (0, 0)


def test_data_is_left_out_and_control_values_are_kept():
    large = torch.ones(MAX_FLOAT_BYTES // 4 + 1)
    small, indices = torch.ones(MAX_FLOAT_BYTES // 4), torch.ones(1 << 16, dtype=torch.int32)
    transcript = recorded(("0", "broadcast", [large, small, indices]))
    assert transcript.nbytes == small.nbytes + indices.nbytes
    outputs = [torch.zeros_like(t) for t in (large, small, indices)]
    Transcript.from_bytes(transcript.to_bytes()).play("0", "broadcast", outputs)
    assert [t.sum().item() for t in outputs] == [0, small.numel(), indices.numel()]


def of_setup(*outputs, by=None):
    """A transcript of set-up in which a collective of the script's, or of the named module, gave these outputs."""
    transcript = Transcript(of_setup=True)
    scope = {"__name__": by or __name__, "transcript": transcript, "outputs": outputs}
    name = "<library>" if by else __file__
    exec(compile("entry = transcript.reserve('0', 'broadcast', outputs)", name, "exec"), scope)
    transcript.fill(scope["entry"], outputs)
    return transcript


def played(transcript, *outputs):
    Transcript.from_bytes(transcript.to_bytes()).play("0", "broadcast", outputs)
    return [tensor.flatten()[0].item() for tensor in outputs]


LARGE = (MAX_FLOAT_BYTES // 4 + 1,)


@pytest.mark.parametrize(("by", "kept"), [(None, 3), ("accelerate", 3), ("torch.nn.parallel.distributed", 0)])
def test_large_data_of_set_up_is_kept_unless_torch_sends_it(by, kept):
    transcript = of_setup(torch.full(LARGE, 3.0), by=by)
    assert transcript.end_setup([]) == []
    assert played(transcript, torch.zeros(LARGE)) == [kept]


def test_what_is_in_the_memory_of_protected_state_is_not_kept():
    protected, other = torch.full((2, *LARGE), 1.0), torch.full(LARGE, 2.0)
    transcript = of_setup(protected[0], other)
    assert transcript.end_setup([protected]) == []
    assert transcript.nbytes == other.nbytes
    assert played(transcript, torch.zeros(LARGE), torch.zeros(LARGE)) == [0, 2]


def test_memory_that_was_freed_and_given_to_protected_state_is_another_one():
    data = torch.full(LARGE, 2.0)
    transcript = of_setup(data)
    address = data.data_ptr()
    del data
    protected = torch.empty(LARGE)
    assert transcript.end_setup([protected]) == []
    assert played(transcript, torch.zeros(LARGE)) == [2], (protected.data_ptr(), address)


def test_a_collective_that_the_loop_waits_for_is_kept_too():
    protected, data = torch.full(LARGE, 1.0), torch.full(LARGE, 2.0)
    transcript = Transcript(of_setup=True)
    entry = transcript.reserve("0", "broadcast", [protected, data])
    in_loop = [transcript.end_setup([protected]), transcript.reserve("0", "broadcast", [data])]
    transcript.fill(entry, [protected, data])
    transcript.fill(in_loop[1], [data])
    assert in_loop[0] == []
    assert transcript.nbytes == data.nbytes
    assert played(transcript, torch.zeros(LARGE), torch.zeros(LARGE)) == [0, 2]


@pytest.mark.parametrize("held", [0, 1 << 20])
def test_data_without_room_is_named_unless_it_equals_protected_state_or_a_library_has_sent_it(held, monkeypatch):
    monkeypatch.setattr("deadpool_run.worker.transcript.transcript.MAX_BYTES", 100)
    monkeypatch.setattr("deadpool_run.worker.transcript.setup_outputs._MOST_HELD", held)
    data, equal = torch.full(LARGE, 2.0), torch.full(LARGE, 3.0)
    transcript = of_setup(data, equal)
    assert transcript.end_setup([equal.clone()]) == ["broadcast of [1025] float32 (4.1 kB)"]
    assert of_setup(data, by="accelerate").end_setup([]) == []
    assert played(transcript, torch.zeros(LARGE), torch.zeros(LARGE)) == [0, 0]


def test_slots_are_in_the_order_of_issue_and_groups_are_apart():
    transcript = Transcript()
    one, two = torch.tensor([1]), torch.tensor([2])
    first, second = (transcript.reserve("0", "recv", [t]) for t in (one, two))
    other = transcript.reserve("1", "recv", [one])
    transcript.fill(second, [two], source=3)
    transcript.fill(first, [one])
    transcript.fill(other, [torch.tensor([9])])
    played = Transcript.from_bytes(transcript.to_bytes())
    got = []
    for group in ("0", "1", "0"):
        out = torch.zeros(1, dtype=torch.int64)
        slot = played.play(group, "recv", [out])
        got.append((out.item(), slot.source))
    assert got == [(1, None), (9, None), (2, 3)]


@pytest.mark.parametrize(
    ("name", "output"),
    [
        ("broadcast", torch.zeros(2, dtype=torch.int64)),
        ("allreduce", torch.zeros(3, dtype=torch.int64)),
        ("allreduce", torch.zeros(2, dtype=torch.int32)),
    ],
)
def test_another_collective_is_a_miss_and_is_left_alone(name, output):
    played = Transcript.from_bytes(recorded(("0", "allreduce", [torch.tensor([1, 2])])).to_bytes())
    assert played.play("0", name, [output]) is None
    assert played.play("0", "allreduce", [torch.zeros(2, dtype=torch.int64)]) is None  # past the end
    assert played.misses == 2
    assert not output.any()


def test_a_collective_that_never_completed_has_no_values():
    transcript = Transcript()
    transcript.reserve("0", "recv", [torch.zeros(1)])
    out = torch.full((1,), 5.0)
    assert Transcript.from_bytes(transcript.to_bytes()).play("0", "recv", [out]) is not None
    assert out.item() == 5


def test_too_much_is_said_and_not_stored(monkeypatch):
    monkeypatch.setattr("deadpool_run.worker.transcript.transcript.MAX_BYTES", 100)
    transcript = recorded(("0", "broadcast", [torch.zeros(64, dtype=torch.uint8)]))
    assert not transcript.overflowed
    more = torch.zeros(64, dtype=torch.uint8)
    transcript.fill(transcript.reserve("0", "broadcast", [more]), [more])
    assert transcript.overflowed
    with pytest.raises(SnapshotError, match="no spare can rehearse this rank\nread such data from a file on each rank"):
        transcript.to_bytes()


def test_damage_anywhere_is_refused():
    data = recorded(("0", "broadcast", [torch.tensor([1, 2])])).to_bytes()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(SnapshotError):
            Transcript.from_bytes(bytes(damaged))
    for length in (0, 5, 40, len(data) - 1):
        with pytest.raises(SnapshotError):
            Transcript.from_bytes(data[:length])


def test_facts_come_back_with_names_that_are_no_utf8():
    transcript = recorded()
    transcript.facts = {"optimizers": ["\udce9"], "buckets": [True]}
    assert Transcript.from_bytes(transcript.to_bytes()).facts == transcript.facts


SHAPE = ["torch.int64", [2]]


@pytest.mark.parametrize(
    "content",
    [
        [],
        {"entries": {}},
        {"entries": {}, "facts": b"{"},
        {"entries": {}, "facts": b"[1]"},
        {"entries": {}, "facts": b"[" * 100_000},
        {"entries": {}, "facts": b"1" * 10_000},
        {"entries": {"0": 1}, "facts": b"{}"},
        *(
            {"entries": {"0": [{"name": "recv", "shapes": [shape], "values": [value]}]}, "facts": b"{}"}
            for shape, value in (
                (SHAPE, b"short"),
                (SHAPE, 16),
                (SHAPE, "sixteen letters."),
                (["torch.nonsense", [2]], bytes(16)),
                (["torch.nn", [2]], bytes(16)),
                (["torch.int64", [-2]], bytes(16)),
                (["torch.int64", [-2, -1]], bytes(16)),
                (["torch.int64", [1 << 40]], bytes(16)),
                (["torch.int64", [1 << 62] * 3], bytes(16)),
                (["torch.int64", [0, 1 << 62, 1 << 62]], b""),
                (["torch.onnx", [2]], bytes(16)),
                (["torch.quint4x2", [2]], bytes(16)),  # torch crashes
            )
        ),
    ],
)
def test_malformed_content_is_refused_even_with_its_digest(content):
    with pytest.raises(SnapshotError, match="is malformed"):
        Transcript.from_bytes(stored(msgspec.msgpack.encode(content)))


def stored(body):
    """A transcript whose digest fits, whatever it holds: the digest has no key, and anybody can make it."""
    return _MAGIC + hashlib.blake2b(body, digest_size=32).digest() + body


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x91" * 100_000, b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_bytes_that_are_no_content_are_refused_even_with_their_digest(body):
    with pytest.raises(SnapshotError, match="is malformed"):
        Transcript.from_bytes(stored(body))


SIZES = st.lists(st.integers(-2, 3) | st.integers(-(1 << 63), (1 << 64) - 1), max_size=4)
SHAPES = st.lists(st.tuples(st.sampled_from(sorted(transcript_module._DTYPES)) | st.text(), SIZES), max_size=3)
VALUES = st.lists(st.none() | st.binary(max_size=24) | JSON, max_size=3)
ENTRIES = st.fixed_dictionaries(
    {"name": st.text() | JSON, "shapes": SHAPES | JSON, "values": VALUES | JSON}, optional={"source": JSON}
)
GROUPS = st.dictionaries(st.text(max_size=2), st.lists(ENTRIES, max_size=3), max_size=2)
CONTENTS = st.fixed_dictionaries({"entries": GROUPS | JSON, "facts": st.just(b"{}") | texts() | JSON}) | JSON


@given(st.binary() | st.binary().map(stored) | CONTENTS.map(lambda each: stored(packed(each))))
def test_any_bytes_are_a_transcript_or_one_error(data):
    with contextlib.suppress(SnapshotError):
        transcript = Transcript.from_bytes(data)
        for group, entries in transcript._entries.items():
            for each in entries:
                with contextlib.suppress(RuntimeError, KeyError, OverflowError):  # of the test: no such tensor
                    outputs = [torch.zeros(sizes, dtype=transcript_module._DTYPES[name]) for name, sizes in each.shapes]
                    transcript.play(group, each.name, outputs)


def packed(content):
    """MessagePack of anything; text and numbers that it does not have are left out."""
    try:
        return msgspec.msgpack.encode(content)
    except (UnicodeEncodeError, OverflowError):
        return b"\xc0"
