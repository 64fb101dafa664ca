"""The files of a durable checkpoint: names, the record, and each rank's part. No I/O.

`step-00000012` holds a torch.distributed.checkpoint (`.metadata`, `__*.distcp`), for each rank a part, and a record:

    deadpool.json         the run, version and world; the digests of all parts, and of itself. Written last
    rank-00003.deadpool   restores the rank's slot byte by byte: the place and digest of each tensor, then the slot's
                          manifest and all small values

The tensors are only in torch's files. Nothing here is ever unpickled.
"""

import json
import re
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from deadpool_run.errors import CheckpointError, ProtocolError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.segments import digest_of
from deadpool_run.wire import typed

KIND = "deadpool-run checkpoint"
FORMAT = 2
RECORD = "deadpool.json"
METADATA = ".metadata"
"""Torch's own description of a checkpoint."""
UNFINISHED = ".tmp"
"""Suffix of a directory that is being written."""
SUPERSEDED = ".old"
"""Suffix of a directory that is being replaced."""
NOTHING = Version(-1)

_NAME = re.compile(r"step-([0-9]{8,18})")
_LEFTOVER = re.compile(rf"{_NAME.pattern}(\.[0-9a-f]+)?({re.escape(UNFINISHED)}|{re.escape(SUPERSEDED)})")
_PART_MAGIC = b"deadpart"
_PART = struct.Struct("<8sIIQQQ")


def name_of(version: Version) -> str:
    """Return the directory name of a version."""
    return f"step-{version:08d}"


def version_in(name: str) -> Version | None:
    """Return the version in a directory name; None if it is not a checkpoint's."""
    match = _NAME.fullmatch(name)
    return Version(int(match[1])) if match else None


def versions_in(names: Iterable[str]) -> list[Version]:
    """Return the versions in those names that are a checkpoint's, oldest first."""
    return sorted(version for name in names if (version := version_in(name)) is not None)


def leftover(name: str) -> bool:
    """Return whether a killed writer left this directory."""
    return _LEFTOVER.fullmatch(name) is not None


class CheckpointStep(StrEnum):
    """The steps in which nodes write one checkpoint together. A step begins when all nodes have completed the last."""

    PREPARE = "prepare"
    """Start a process and allocate memory for a copy."""
    COPY = "copy"
    """Copy the version's slots, which are kept meanwhile. The leader makes the directory."""
    SURVEY = "survey"
    """Write the list of this node's pieces into a file."""
    WRITE = "write"
    """Write the tensors that this node owns, according to all lists; write their places into a file."""
    PARTS = "parts"
    """Write each rank's part."""
    COMPLETE = "complete"
    """The leader writes metadata and record, and makes the checkpoint appear."""


def part_name(rank: Rank) -> str:
    """Return the file name of a rank's part."""
    return f"rank-{rank:05d}.deadpool"


@dataclass(frozen=True, slots=True)
class PartStamp:
    """The size and digest of a rank's part in the record."""

    rank: Rank
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Record:
    """The content of `deadpool.json`."""

    run: str
    version: Version
    world_size: int
    meshes: tuple[str, ...]
    """Of the sharded tensors; for human readers."""
    torch: str
    written: str
    """ISO-8601, UTC."""
    metadata: str
    """Digest of torch's `.metadata`."""
    parts: tuple[PartStamp, ...]
    """One per rank, in order."""


@dataclass(frozen=True, slots=True)
class PartPlace:
    """The slice of a file in which `torch.save` wrote a tensor. The digest is of the tensor's plain bytes."""

    file: str
    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Part:
    """A rank's part. `tail` is the slot between the end of its tensors and its manifest."""

    rank: Rank
    version: Version
    tail_offset: int
    places: tuple[PartPlace | None, ...]
    """Of the manifest's tensors in order; None for an empty one."""
    manifest: bytes
    tail: bytes


def encode_record(record: Record) -> bytes:
    """Return the record as a file, with its own digest."""
    return json.dumps({**_plain(record), "digest": record_digest(record)}, indent=1).encode() + b"\n"


def record_digest(record: Record) -> str:
    """Return the digest that the record's file has. It covers all ranks' parts, and these every tensor."""
    return _digest(_plain(record))


def decode_record(data: bytes) -> Record:
    """Return the record in a file. Raises `CheckpointError` without the file's name."""
    try:
        parts: dict[str, Any] = typed.parse(data)
        kind, form, digest = parts["kind"], parts["format"], parts.pop("digest")
        recorded = _digest(parts)
    except (ProtocolError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError("not the record of a deadpool-run checkpoint, or truncated") from error
    if kind != KIND:
        raise CheckpointError(f"the record of a {str(kind)[:40]!r}, not of a {KIND}")
    if form != FORMAT:
        raise CheckpointError(f"of format {form!r}, and this version of deadpool-run reads only format {FORMAT}")
    if digest != recorded:
        raise CheckpointError("damaged: its digest is not the recorded one")
    try:
        return typed.from_plain(Record, parts)
    except ProtocolError as error:
        raise CheckpointError(f"not a record of format {FORMAT}: {error}") from error


def encode_part(part: Part) -> bytes:
    """Return a part as a file."""
    head = {"rank": part.rank, "version": part.version, "tail_offset": part.tail_offset, "places": part.places}
    body = typed.to_json(head)
    sizes = _PART.pack(_PART_MAGIC, FORMAT, 0, len(body), len(part.manifest), len(part.tail))
    return b"".join((sizes, body, part.manifest, part.tail))


def decode_part(data: bytes) -> Part:
    """Return the part in a file whose digest was checked. Raises `CheckpointError` without the file's name."""
    try:
        magic, form, _, body_bytes, manifest_bytes, tail_bytes = _PART.unpack_from(data)
        manifest_at = _PART.size + body_bytes
        tail_at = manifest_at + manifest_bytes
        if magic != _PART_MAGIC or form != FORMAT or tail_at + tail_bytes != len(data):
            raise CheckpointError(f"not a rank's part of format {FORMAT}")
        head = typed.parse(data[_PART.size : manifest_at])
        return typed.from_plain(Part, head | {"manifest": data[manifest_at:tail_at], "tail": data[tail_at:]})
    except (struct.error, TypeError, ProtocolError) as error:
        raise CheckpointError(f"not a rank's part of format {FORMAT}") from error


def _plain(record: Record) -> dict[str, Any]:
    return {"kind": KIND, "format": FORMAT, **asdict(record)}


def _digest(parts: dict[str, Any]) -> str:
    return digest_of(json.dumps(parts, separators=(",", ":"), sort_keys=True).encode()).hex()
