"""The transcript as a file format and as a player; no processes."""

import hashlib

import msgspec
import pytest
import torch

from deadpool_run.errors import SnapshotError
from deadpool_run.worker.groups.transcript import _MAGIC, MAX_FLOAT_BYTES, Transcript

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


def test_data_is_left_out_and_control_values_are_kept():
    large = torch.ones(MAX_FLOAT_BYTES // 4 + 1)
    small, indices = torch.ones(MAX_FLOAT_BYTES // 4), torch.ones(1 << 16, dtype=torch.int32)
    transcript = recorded(("0", "broadcast", [large, small, indices]))
    assert transcript.nbytes == small.nbytes + indices.nbytes
    outputs = [torch.zeros_like(t) for t in (large, small, indices)]
    Transcript.from_bytes(transcript.to_bytes()).play("0", "broadcast", outputs)
    assert [t.sum().item() for t in outputs] == [0, small.numel(), indices.numel()]


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
    monkeypatch.setattr("deadpool_run.worker.groups.transcript.MAX_BYTES", 100)
    transcript = recorded(("0", "broadcast", [torch.zeros(64, dtype=torch.uint8)]))
    assert not transcript.overflowed
    more = torch.zeros(64, dtype=torch.uint8)
    transcript.fill(transcript.reserve("0", "broadcast", [more]), [more])
    assert transcript.overflowed
    with pytest.raises(SnapshotError, match="no spare can rehearse"):
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
            )
        ),
    ],
)
def test_malformed_content_is_refused_even_with_its_digest(content):
    body = msgspec.msgpack.encode(content)
    with pytest.raises(SnapshotError, match="is malformed"):
        Transcript.from_bytes(_MAGIC + hashlib.blake2b(body, digest_size=32).digest() + body)
