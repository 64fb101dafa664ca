"""What makes a directory of files a durable checkpoint: names, the record, and each rank's part. Pure.

`step-00000012` holds a torch.distributed.checkpoint (`.metadata`, `__*.distcp`), for each rank a part, and a record:

    deadpool.json         which run, version and world; the digest of every part, and of itself. Written last
    rank-00003.deadpool   what brings back the rank's slot byte by byte: where each of its tensors is and its digest,
                          then the slot's manifest and everything small, as they were

The tensors are in torch's files only. Nothing here is ever unpickled.
"""

import json
import re
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from deadpool_run.errors import CheckpointError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault.segments import digest_of

KIND = "deadpool-run checkpoint"
FORMAT = 2
RECORD = "deadpool.json"
METADATA = ".metadata"
"""Torch's own description of a checkpoint."""
UNFINISHED = ".tmp"
"""Behind the name of a directory that is being written."""
SUPERSEDED = ".old"
"""Behind the name of one that is being replaced."""
NOTHING = Version(-1)

_NAME = re.compile(r"step-([0-9]{8,18})")
_LEFTOVER = re.compile(rf"{_NAME.pattern}(\.[0-9a-f]+)?({re.escape(UNFINISHED)}|{re.escape(SUPERSEDED)})")
_PART_MAGIC = b"deadpart"
_PART = struct.Struct("<8sIIQQQ")


def name_of(version: Version) -> str:
    """Return the directory of a version."""
    return f"step-{version:08d}"


def version_in(name: str) -> Version | None:
    """Return the version that a directory's name stands for; None if it is no checkpoint's."""
    match = _NAME.fullmatch(name)
    return Version(int(match[1])) if match else None


def leftover(name: str) -> bool:
    """Tell whether a directory is what a writer that was killed has left."""
    return _LEFTOVER.fullmatch(name) is not None


class CheckpointStep(StrEnum):
    """What nodes do one after the other, each when all have done the one before, to write one checkpoint together."""

    PREPARE = "prepare"
    """Make a process and the room for a copy."""
    COPY = "copy"
    """Copy the version's slots; nobody overwrites them meanwhile. Whoever leads makes the directory."""
    SURVEY = "survey"
    """Tell in a file what there is."""
    WRITE = "write"
    """Write those tensors that this node is to write, by what all have told; tell in a file where they are."""
    PARTS = "parts"
    """Write what brings back each rank's slot."""
    COMPLETE = "complete"
    """Whoever leads writes what is of the whole, and has it appear."""


def part_name(rank: Rank) -> str:
    """Return the file of a rank's part."""
    return f"rank-{rank:05d}.deadpool"


@dataclass(frozen=True, slots=True)
class PartStamp:
    """A rank's part, as the record knows it."""

    rank: Rank
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Record:
    """What `deadpool.json` says."""

    run: str
    version: Version
    world_size: int
    meshes: tuple[str, ...]
    """Of the sharded tensors, for those who read it."""
    torch: str
    written: str
    """ISO-8601, UTC."""
    metadata: str
    """Digest of torch's `.metadata`."""
    parts: tuple[PartStamp, ...]
    """One per rank, in order."""


@dataclass(frozen=True, slots=True)
class PartPlace:
    """Where a tensor is: this slice of that file is what `torch.save` wrote. The digest is of its plain bytes."""

    file: str
    offset: int
    nbytes: int
    digest: str


@dataclass(frozen=True, slots=True)
class Part:
    """What a rank's part says. `tail` is the slot from the end of its tensors to its manifest."""

    rank: Rank
    version: Version
    tail_offset: int
    places: tuple[PartPlace | None, ...]
    """Of the manifest's tensors, in its order; None for one without bytes."""
    manifest: bytes
    tail: bytes


def encode_record(record: Record) -> bytes:
    """Return the record as a file, its own digest among it."""
    parts = {"kind": KIND, "format": FORMAT, **asdict(record)}
    return json.dumps({**parts, "digest": _digest(parts)}, indent=1).encode() + b"\n"


def decode_record(data: bytes) -> Record:
    """Return the record that a file holds. Raises `CheckpointError` without saying where."""
    try:
        parts: dict[str, Any] = json.loads(data)
        kind, form, digest = parts["kind"], parts["format"], parts.pop("digest")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError("not the record of a deadpool-run checkpoint, or cut short") from error
    if kind != KIND:
        raise CheckpointError(f"the record of a {str(kind)[:40]!r}, not of a {KIND}")
    if form != FORMAT:
        raise CheckpointError(f"of format {form!r}; this version of deadpool-run reads format {FORMAT}")
    if digest != _digest(parts):
        raise CheckpointError("damaged: it does not have the digest that it says")
    del parts["kind"], parts["format"]
    stamps = tuple(PartStamp(**stamp) for stamp in parts.pop("parts"))
    return Record(**{**parts, "meshes": tuple(parts["meshes"])}, parts=stamps)


def encode_part(part: Part) -> bytes:
    """Return a part as a file."""
    places = [None if place is None else asdict(place) for place in part.places]
    head = {"rank": part.rank, "version": part.version, "tail_offset": part.tail_offset, "places": places}
    body = json.dumps(head, separators=(",", ":")).encode()
    sizes = _PART.pack(_PART_MAGIC, FORMAT, 0, len(body), len(part.manifest), len(part.tail))
    return b"".join((sizes, body, part.manifest, part.tail))


def decode_part(data: bytes) -> Part:
    """Return the part that a file holds, whose digest has been checked. Raises `CheckpointError` without saying where."""
    try:
        magic, form, _, *sizes = _PART.unpack_from(data)
        if magic != _PART_MAGIC or form != FORMAT or sum(sizes) != len(data) - _PART.size:
            raise CheckpointError(f"not a rank's part of format {FORMAT}")
        body, manifest, tail = _cut(data, _PART.size, sizes)
        head = json.loads(body)
        places = tuple(None if place is None else PartPlace(**place) for place in head["places"])
        return Part(Rank(head["rank"]), Version(head["version"]), head["tail_offset"], places, manifest, tail)
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"not a rank's part of format {FORMAT}") from error


def _cut(data: bytes, start: int, sizes: Sequence[int]) -> list[bytes]:
    pieces = []
    for size in sizes:
        pieces.append(data[start : start + size])
        start += size
    return pieces


def _digest(parts: dict[str, Any]) -> str:
    return digest_of(json.dumps(parts, separators=(",", ":"), sort_keys=True).encode()).hex()
