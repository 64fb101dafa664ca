"""Loads a durable checkpoint into slots. An incomplete, damaged or foreign one is rejected, with the place of the error.

Nothing is unpickled: our own files have the place of each tensor, and torch's slices are read as `weights_only`.
"""

import contextlib
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import IO

import torch

from deadpool_run.errors import CheckpointError, SnapshotError
from deadpool_run.ids import Rank
from deadpool_run.vault import checkpoint_format, segments
from deadpool_run.vault.segments import TensorEntry
from deadpool_run.wire.checkpoints import CheckpointLoaded, ChooseCheckpoint, FillSlots
from deadpool_run.worker.checkpoint.slots import THREADS, Filling, Slots
from deadpool_run.worker.checkpoint.storage import Storage, storage_at

_AUTO, _NEVER = "auto", "never"


@dataclass(frozen=True, slots=True)
class _Candidate:
    storage: Storage
    name: str

    def open(self, file: str) -> IO[bytes]:
        return self.storage.open(f"{self.name}/{file}")

    def read(self, file: str) -> bytes:
        with self.open(file) as stream:
            return stream.read()

    def record(self) -> checkpoint_format.Record:
        return checkpoint_format.decode_record(self.read(checkpoint_format.RECORD))


def choose(order: ChooseCheckpoint) -> CheckpointLoaded:
    """Return the newest good checkpoint to resume from, by its record and metadata only.

    Prepares the place for new ones if the job begins. Raises `CheckpointError` if there are checkpoints and none can
    be used, or not the one that the user named.
    """
    if order.first and order.target:
        storage = storage_at(order.target)
        storage.prepare()
        if order.resume != _AUTO:
            _refuse_newer(storage, order.resume)
    refused, passed_over = [], False
    for candidate in _candidates(order):
        where = candidate.storage.where(candidate.name)
        if where in order.but:
            passed_over = True
            continue
        try:
            record = _checked_record(candidate, order.world_size)
            _check_metadata(candidate, record)
        except (CheckpointError, OSError) as error:
            refused.append(f"checkpoint {where} is refused: {_message(error)}")
            continue
        return CheckpointLoaded(record.version, where, record.written, refused, checkpoint_format.record_digest(record))
    if not refused and not passed_over:
        return CheckpointLoaded(checkpoint_format.NOTHING, "", "", [], "")
    advice = (
        "There is no other checkpoint to resume from. To start from the beginning, pass another directory to --durable."
    )
    raise CheckpointError("\n".join((*refused, advice)))


def fill(order: FillSlots, slots: Slots) -> CheckpointLoaded:
    """Fill the first slot of each rank from this checkpoint. Empties them and raises `CheckpointError` on failure."""
    candidate = _named(order.where)
    assert candidate is not None
    try:
        record = _checked_record(candidate, order.world_size)
        _refuse_other(record, order.record)
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda rank: _fill_rank(candidate, record, rank, slots[rank][0]), slots))
    except (CheckpointError, OSError) as error:
        for fd, _ in slots.values():
            segments.mark_empty(fd)
        raise CheckpointError(_message(error)) from error
    return CheckpointLoaded(record.version, order.where, record.written, [], order.record)


def _message(error: CheckpointError | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or ''}: {error.strerror or error}".removeprefix(": ")
    return str(error)


def _candidates(order: ChooseCheckpoint) -> Iterator[_Candidate]:
    named, start = _named(order.resume), _start_of(order.resume)
    if order.target and (order.resume == _AUTO or not order.first):
        storage = storage_at(order.target)
        for version in reversed(storage.versions()):
            if start is not None and version <= start:  # of an older run, which may have had the same id
                break
            candidate = _Candidate(storage, checkpoint_format.name_of(version))
            if order.resume == _AUTO or not _is_of_another(candidate, order.run):
                yield candidate
    if named is not None:
        yield named


def _named(resume: str) -> _Candidate | None:
    if resume in (_AUTO, _NEVER):
        return None
    place, _, name = (resume if "://" in resume else str(Path(resume).absolute())).rstrip("/").rpartition("/")
    return _Candidate(storage_at(place), name)


def _start_of(resume: str) -> int | None:
    """Return the version of a checkpoint that the user has named; None if there is none in its name."""
    named = _named(resume)
    return None if named is None else checkpoint_format.version_in(named.name)


def _is_of_another(candidate: _Candidate, run: str) -> bool:
    """Return whether its record names another run. One that cannot be read may be this run's, and is refused by name later."""
    try:
        return candidate.record().run != run
    except (CheckpointError, OSError):
        return False


def _refuse_newer(storage: Storage, resume: str) -> None:
    """Reject a directory with newer checkpoints than the start: they would be mistaken for this run's."""
    start = _start_of(resume)
    newer = [checkpoint_format.name_of(version) for version in storage.versions() if start is None or version > start]
    if newer:
        raise CheckpointError(
            f"{storage.where()} holds {', '.join(newer)}, which this run must not resume from (--resume {resume}).\n"
            "Move them away, pass another directory to --durable, or pass --resume auto."
        )


# --- one checkpoint ----------------------------------------------------------------------------------------------


def _checked_record(candidate: _Candidate, world_size: int) -> checkpoint_format.Record:
    try:
        record = candidate.record()
    except FileNotFoundError as error:
        raise CheckpointError(
            f"it has no {checkpoint_format.RECORD}: it was never finished, or another program wrote it"
        ) from error
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoint_format.RECORD} is {error}") from error
    if record.world_size != world_size:
        raise CheckpointError(
            f"it has {record.world_size} ranks, and this world has {world_size}: "
            "a checkpoint cannot be loaded with another number of ranks"
        )
    if checkpoint_format.version_in(candidate.name) not in (None, record.version):
        raise CheckpointError(
            f"its {checkpoint_format.RECORD} has version {record.version}: somebody has renamed it from "
            f"{checkpoint_format.name_of(record.version)}"
        )
    return record


def _refuse_other(record: checkpoint_format.Record, chosen: str) -> None:
    """Refuse another checkpoint than the chosen one: other nodes load that one, and would train on with this rank's weights."""
    found = checkpoint_format.record_digest(record)
    if found != chosen:
        raise CheckpointError(
            f"it is another checkpoint on this node: that of run {record.run}, written {record.written}, whose record has the "
            f"digest {found[:12]}, and the chosen one has {chosen[:12]}.\n"
            "The path must lead to the same directory on every machine, and stay the same while a job begins"
        )


def _check_metadata(candidate: _Candidate, record: checkpoint_format.Record) -> None:
    if segments.digest_of(candidate.read(checkpoint_format.METADATA)).hex() != record.metadata:
        raise CheckpointError(f"{checkpoint_format.METADATA} is damaged: its digest is not the recorded one")


def _fill_rank(candidate: _Candidate, record: checkpoint_format.Record, rank: Rank, fd: int) -> None:
    file = checkpoint_format.part_name(rank)
    data, stamp = candidate.read(file), record.parts[rank]
    if len(data) != stamp.nbytes or segments.digest_of(data).hex() != stamp.digest:
        raise CheckpointError(
            f"{file} is damaged: its {len(data)} bytes are not the {stamp.nbytes} bytes that were recorded"
        )
    try:
        part = checkpoint_format.decode_part(data)
        # The manifest of a slot comes right after its small values.
        filling = Filling(fd, part.tail_offset + len(part.tail), part.manifest, record.version)
    except (CheckpointError, SnapshotError) as error:
        raise CheckpointError(f"{file} is {error}") from error
    if (part.rank, part.version, filling.manifest.rank) != (rank, record.version, rank):
        raise CheckpointError(f"{file} belongs to rank {part.rank} at version {part.version}")
    with contextlib.ExitStack() as stack:
        streams: dict[str, IO[bytes]] = {}
        for entry, place in zip(filling.manifest.tensors, part.places, strict=True):
            if place is None:
                continue
            if place.file not in streams:
                streams[place.file] = stack.enter_context(candidate.open(place.file))
            _put(filling, entry, place, streams[place.file])
    filling.complete(part.tail_offset, part.tail)


def _put(filling: Filling, entry: TensorEntry, place: checkpoint_format.PartPlace, stream: IO[bytes]) -> None:
    stream.seek(place.offset)
    data = stream.read(place.nbytes)
    if len(data) != place.nbytes:
        raise CheckpointError(f"{place.file} is truncated: {entry.name} is at byte {place.offset}")
    try:
        digest = filling.put(entry, torch.load(io.BytesIO(data), map_location="cpu", weights_only=True))
    except (RuntimeError, UnpicklingError, ValueError, TypeError, EOFError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{place.file} is damaged at byte {place.offset} ({entry.name}): {error}") from error
    if digest.hex() != place.digest:
        raise CheckpointError(
            f"{place.file} is damaged at byte {place.offset}: the digest of {entry.name} is not the recorded one"
        )
