"""Slots and blobs as bytes: what is not whole is nothing."""

import os

import pytest

from deadpool_run.errors import SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.segments import HEADER_BYTES, Placement, SegmentState, SlotHeader, SlotRole, TensorEntry
from deadpool_run.wire.typed import to_json

ENTRIES = (
    TensorEntry("model/a", SlotRole.PARAMETER, "float32", (2, 2), (1, 2), "cpu", HEADER_BYTES, 16),
    TensorEntry(
        "optimizer/model/a/m",
        SlotRole.OPTIMIZER,
        "bfloat16",
        (4,),
        (1,),
        "cuda",
        HEADER_BYTES + 64,
        8,
        Placement((2, 2), ("dp", "tp"), (0, 1), ("R", "S(0)"), (8,), (1,)),
    ),
)


@pytest.fixture
def fd():
    made = os.memfd_create("test")  # one that can be cut short
    yield made
    os.close(made)


def write(fd, *, version=7, entries=ENTRIES, blobs=((HEADER_BYTES + 128, 3),)):
    end = HEADER_BYTES + 131
    manifest = segments.encode_manifest(
        version=Version(version),
        rank=Rank(3),
        tensors=to_json(entries),
        value_tensors=to_json(()),
        blobs=blobs,
        values={"a": [1, None, "ü"]},
    )
    segments.write_all(fd, b"abc" + manifest, HEADER_BYTES + 128)
    header = SlotHeader(SegmentState.COMPLETE, version, end, len(manifest), segments.digest_of(manifest))
    segments.write_header(fd, header)
    return header


def test_a_manifest_comes_back(fd):
    header = write(fd)
    assert segments.read_header(fd) == header
    manifest = segments.read_manifest(fd, Version(7))
    assert manifest.tensors == ENTRIES
    assert manifest.rank == 3
    assert manifest.values == {"a": [1, None, "ü"]}
    assert [segments.read_exactly(fd, nbytes, at) for at, nbytes in manifest.blobs] == [b"abc"]
    assert list(manifest.ranges()) == [(HEADER_BYTES, 16), (HEADER_BYTES + 64, 8), (HEADER_BYTES + 128, 3)]


def test_a_slot_copied_by_sendfile_is_the_same_slot(fd):
    header = write(fd)
    other = segments.create_memory("copy")
    sent = 0
    while sent < header.used_bytes:
        sent += os.sendfile(other, fd, sent, header.used_bytes - sent)
    assert segments.read_manifest(other, Version(7)) == segments.read_manifest(fd, Version(7))
    os.close(other)


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES])
def test_fresh_memory_holds_nothing(fd, size):
    os.ftruncate(fd, size)
    assert segments.read_header(fd) is None
    assert segments.complete_version(fd) is None
    assert segments.read_blob(fd) is None


@pytest.mark.parametrize("mark", [segments.mark_busy, segments.mark_empty])
def test_a_slot_marked_otherwise_is_not_complete(fd, mark):
    write(fd)
    assert segments.complete_version(fd) == 7
    mark(fd)
    assert segments.complete_version(fd) is None
    with pytest.raises(SnapshotError, match="does not hold a complete snapshot 7"):
        segments.read_manifest(fd, Version(7))


def test_no_byte_of_the_header_may_change(fd):
    write(fd)
    size = segments._SLOT.size + 16
    whole = os.pread(fd, size, 0)
    for index in range(size):
        os.pwrite(fd, bytes([whole[index] ^ 1]), index)
        assert segments.read_header(fd) is None, f"byte {index}"
        os.pwrite(fd, whole, 0)
    assert segments.complete_version(fd) == 7


def test_no_byte_of_the_manifest_may_change(fd):
    header = write(fd)
    os.pwrite(fd, b"]", header.manifest_offset + 20)
    with pytest.raises(SnapshotError, match="digest"):
        segments.read_manifest(fd, Version(7))


def test_a_manifest_may_not_point_outside_of_its_slot(fd):
    write(fd, blobs=((HEADER_BYTES + 128, 1 << 40),))
    with pytest.raises(SnapshotError, match="outside of its slot"):
        segments.read_manifest(fd, Version(7))


def test_a_slot_cut_short_holds_nothing(fd):
    header = write(fd)
    os.ftruncate(fd, header.used_bytes - 1)
    assert segments.complete_version(fd) is None


@pytest.mark.parametrize("data", [b"", b"x", b"ab" * 5000])
def test_a_blob_comes_back(fd, data):
    segments.write_blob(fd, b"a longer one that was here before" * 400)
    segments.write_blob(fd, data)
    assert segments.read_blob(fd) == data


def test_a_torn_blob_is_nothing(fd):
    segments.write_blob(fd, b"data")
    os.pwrite(fd, b"D", HEADER_BYTES)
    assert segments.read_blob(fd) is None
