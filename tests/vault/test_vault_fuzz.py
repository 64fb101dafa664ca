"""Readers of segments, of headers between vaults and of checkpoints give a value or their one error, for any bytes."""

import os
import struct
from contextlib import closing, contextmanager, suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.garbage import HARD, JSON, changed, texts
from kit.tagged import tagged_pair
from vault_kit import content, fill_slot

from deadpool_run.errors import CheckpointError, ProtocolError, SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import checkpoint_format, segments
from deadpool_run.vault.checkpoint_format import Part, PartPlace, PartStamp, Record
from deadpool_run.vault.segments import SegmentState, SlotHeader
from deadpool_run.vault.transfer import headers
from deadpool_run.vault.transfer.catalog import is_sound
from deadpool_run.wire.frames import pack
from deadpool_run.wire.typed import to_json

PUT = headers.Put(Rank(0), Version(5), bytes(16), 9000, 0, [(Version(5), bytes(16))], 1, bytes(16))


@contextmanager
def memory(data):
    fd = segments.create_memory("fuzz")
    try:
        segments.write_all(fd, data, 0)
        yield fd
    finally:
        os.close(fd)


def read_all(fd):
    """Read a segment in every way; nothing but the declared error may come of it."""
    with suppress(SnapshotError):
        segments.read_header(fd)
    with suppress(SnapshotError):
        segments.read_blob(fd)
    with suppress(SnapshotError):
        segments.read_manifest(fd, Version(5))
    for version in (Version(5), None):
        is_sound(fd, version, bytes(16), 100)


@given(st.binary())
def test_any_bytes_are_a_segment_or_not(data):
    with memory(data) as fd:
        read_all(fd)


@given(st.data())
def test_a_segment_with_other_bytes_is_read_or_not(data):
    with memory(b"") as fd:
        if data.draw(st.booleans()):
            fill_slot(fd, 0, 5, content(0, 5, nbytes=100))
        else:
            segments.write_blob(fd, b"a transcript")
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, 200) | st.integers(segments.HEADER_BYTES, segments.HEADER_BYTES + 400))
            segments.write_all(fd, data.draw(st.binary(min_size=1, max_size=9)), place)
        read_all(fd)


def slot_with(body):
    """A slot whose manifest is `body`, with digests that fit."""
    fd = segments.create_memory("fuzz")
    end = segments.HEADER_BYTES + 100
    segments.write_all(fd, body, end)
    segments.write_header(fd, SlotHeader(SegmentState.COMPLETE, 5, end, len(body), segments.digest_of(body)))
    return fd


ENTRY = to_json(())
MANIFEST = segments.encode_manifest(
    version=Version(5), rank=Rank(0), tensors=ENTRY, value_tensors=ENTRY, blobs=[(segments.HEADER_BYTES, 7)], values={}
)


@given(texts() | changed(MANIFEST))
@example(MANIFEST.replace(b"7", b"9" * 30))
@example(MANIFEST.replace(b"7", b"-7"))
def test_any_manifest_is_one_or_one_error(body):
    fd = slot_with(body)
    try:
        read_all(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("body", HARD)
def test_a_manifest_that_is_hard_to_decode_is_one_error(body):
    fd = slot_with(body)
    try:
        with pytest.raises(SnapshotError):
            segments.read_manifest(fd, Version(5))
    finally:
        os.close(fd)


@given(texts() | changed(to_json(PUT)), st.booleans())
def test_any_header_between_vaults_is_one_or_one_error(body, asks):
    ours, theirs = tagged_pair()
    with ours, theirs:
        ours.send(pack(body, len(body)))
        with suppress(ProtocolError):
            if asks:
                headers.receive_request(theirs, 4, idle=lambda: False)
            else:
                headers.receive_answer(theirs)


@given(st.binary(max_size=80))
@example(struct.pack(">I", 1 << 31))
@example(struct.pack(">I", 2) + b"{}" + bytes(16))
def test_any_stream_between_vaults_is_a_header_or_one_error(data):
    ours, theirs = tagged_pair()
    with closing(theirs):
        with ours:
            ours.sock.sendall(data)
        with suppress(ProtocolError, OSError):
            while headers.receive_request(theirs, 4, idle=lambda: False) is not None:
                pass


RECORD = Record("run", Version(5), 1, (), "2.13", "now", "00", (PartStamp(Rank(0), 10, "00"),))


@given(texts() | changed(checkpoint_format.encode_record(RECORD)))
def test_any_record_of_a_checkpoint_is_one_or_one_error(data):
    with suppress(CheckpointError):
        checkpoint_format.decode_record(data)


@pytest.mark.parametrize("data", HARD)
def test_a_record_that_is_hard_to_decode_is_one_error(data):
    with pytest.raises(CheckpointError):
        checkpoint_format.decode_record(data)


@given(JSON)
def test_a_record_of_other_fields_with_a_fitting_digest_is_one_error(parts):
    body = {"kind": checkpoint_format.KIND, "format": checkpoint_format.FORMAT, "more": parts}
    whole = {**body, "digest": checkpoint_format._digest(body)}
    with pytest.raises(CheckpointError):
        checkpoint_format.decode_record(to_json(whole))


PART = Part(Rank(0), Version(5), 100, (PartPlace("f", 0, 3, "00"), None), b"manifest", b"tail")


@given(st.data())
def test_any_part_of_a_checkpoint_is_one_or_one_error(data):
    head, manifest = data.draw(texts()), data.draw(st.binary(max_size=9))
    sizes = checkpoint_format._PART.pack(
        checkpoint_format._PART_MAGIC, checkpoint_format.FORMAT, 0, len(head), len(manifest), 0
    )
    whole = bytearray(checkpoint_format.encode_part(PART))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    for each in (data.draw(st.binary()), sizes + head + manifest, bytes(whole)):
        with suppress(CheckpointError):
            checkpoint_format.decode_part(each)
