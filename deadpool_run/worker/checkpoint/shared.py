"""One node's part in a checkpoint that several nodes write together, step by step.

Each step begins when every node has completed the last one. Nodes exchange their results in files next to the
checkpoint's, which are removed at the end: all nodes write to the same directory anyway.
"""

import json
import mmap
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from deadpool_run.errors import VersionGoneError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import checkpoint_format, segments
from deadpool_run.vault.checkpoint_format import CheckpointStep, PartStamp, Record
from deadpool_run.vault.status_page import StatusPage
from deadpool_run.wire import typed
from deadpool_run.wire.checkpoints import StepTaken, TakeStep
from deadpool_run.worker.checkpoint import write
from deadpool_run.worker.checkpoint.plan import Path, Piece, assign, meshes, survey
from deadpool_run.worker.checkpoint.slots import THREADS, SlotCopy, Slots, copy_kept, rooms
from deadpool_run.worker.checkpoint.storage import storage_at
from deadpool_run.worker.checkpoint.write import Items, Owners
from deadpool_run.worker.compat import checkpoints

_EXCHANGED = (CheckpointStep.SURVEY, CheckpointStep.WRITE, CheckpointStep.PARTS)
"""Steps with a result file for each node."""


class SharedCheckpoint:
    """One checkpoint, whose steps are taken in order. They raise OSError and `CheckpointError`."""

    def __init__(self, status_page: StatusPage, slots: Slots) -> None:
        """`slots` are those of the ranks on this node."""
        self._status_page = status_page
        self._slots = slots
        self._memories: dict[Rank, mmap.mmap] = {}
        self._copies: list[SlotCopy] = []
        self._pieces: list[Piece] = []
        self._objects: Mapping[Path, Any] = {}
        self._paths: list[Path] = []
        self._owners: Owners = {}
        self._items: Items = {}
        self._uncleaned: list[str] = []

    def take(self, order: TakeStep) -> StepTaken:
        """Take a step."""
        nbytes, where = 0, ""
        self._uncleaned = []
        match CheckpointStep(order.step):
            case CheckpointStep.PREPARE:
                self._memories = rooms(self._slots)
            case CheckpointStep.COPY:
                self._copy(order)
            case CheckpointStep.SURVEY:
                self._survey(order)
            case CheckpointStep.WRITE:
                nbytes = self._write(order)
            case CheckpointStep.PARTS:
                nbytes = self._write_parts(order)
            case CheckpointStep.COMPLETE:
                where = self._complete(order)
        return StepTaken(order.step, where, nbytes, tuple(self._uncleaned))

    def _copy(self, order: TakeStep) -> None:
        copies = copy_kept(self._status_page, self._slots, Version(order.version), self._memories)
        if copies is None:
            raise VersionGoneError(f"not every rank holds version {order.version} any more")
        self._copies = sorted(copies, key=lambda copy: copy.rank)
        if order.leads:
            storage = storage_at(order.target)
            storage.begin(checkpoint_format.name_of(Version(order.version)), order.attempt)
            self._uncleaned = storage.uncleaned

    def _survey(self, order: TakeStep) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            pieces = [piece for copy in self._copies for piece in survey(copy, pool)]
        self._objects = {} if self._copies[0].rank else write.hyperparameters(self._copies[0])
        self._put_result(order, {"pieces": pieces, "paths": list(self._objects)})

    def _write(self, order: TakeStep) -> int:
        self._learn(order)
        writer = storage_at(order.target).writer(_unfinished(order))
        results = write.write_items(writer, order.world_size, self._copies, self._items, self._objects)
        self._put_result(order, {"results": [_encode_result(result) for result in results]})
        return sum(result.size_in_bytes for result in results)

    def _write_parts(self, order: TakeStep) -> int:
        places = write.places_of(self._items, self._results(order))
        parts = [write.part_of(copy, self._owners, places) for copy in self._copies]
        storage = storage_at(order.target)
        stamps = [write.write_part(storage, _unfinished(order), part) for part in parts]
        self._put_result(order, {"stamps": stamps})
        return sum(stamp.nbytes for stamp in stamps)

    def _complete(self, order: TakeStep) -> str:
        storage, unfinished, version = storage_at(order.target), _unfinished(order), Version(order.version)
        self._learn(order)
        write.write_metadata(storage.writer(unfinished), self._items, self._paths, self._results(order))
        parts = typed.from_plain(list[PartStamp], self._results_of(order, CheckpointStep.PARTS)["stamps"])
        for step in _EXCHANGED:
            for first in order.firsts:
                storage.discard(_file(order, step, first))
        with storage.open(f"{unfinished}/{checkpoint_format.METADATA}") as file:
            metadata = segments.digest_of(file.read()).hex()
        record = Record(
            run=order.run,
            version=version,
            world_size=len(parts),
            meshes=meshes(piece.entry for piece in self._pieces),
            torch=torch.__version__,
            written=datetime.now(UTC).isoformat(timespec="seconds"),
            metadata=metadata,
            parts=tuple(sorted(parts, key=lambda part: part.rank)),
        )
        storage.put(f"{unfinished}/{checkpoint_format.RECORD}", checkpoint_format.encode_record(record))  # last of all
        storage.complete(unfinished, checkpoint_format.name_of(version))
        write.prune(storage, version, order.keep)
        self._uncleaned = storage.uncleaned
        return storage.where(checkpoint_format.name_of(version))

    # --- results exchanged by nodes ------------------------------------------------------------------------------

    def _put_result(self, order: TakeStep, result: Mapping[str, Any]) -> None:
        path = _file(order, CheckpointStep(order.step), self._copies[0].rank)
        storage_at(order.target).put(path, typed.to_json(result))

    def _results_of(self, order: TakeStep, step: CheckpointStep) -> Mapping[str, list[Any]]:
        """Return all nodes' results of a step: the lists of each name, joined in the order of ranks."""
        storage, found = storage_at(order.target), defaultdict[str, list[Any]](list)
        for first in sorted(order.firsts):
            with storage.open(_file(order, step, first)) as file:
                for name, results in json.loads(file.read()).items():
                    found[name] += results
        return found

    def _learn(self, order: TakeStep) -> None:
        """Read all nodes' surveys, which determine the owner of each piece."""
        if self._pieces:
            return
        found = self._results_of(order, CheckpointStep.SURVEY)
        pieces = typed.from_plain(list[Piece], found["pieces"])
        self._pieces = sorted(pieces, key=lambda piece: piece.rank)  # stable: each rank's stay in their order
        self._paths = typed.from_plain(list[Path], found["paths"])
        self._owners = {(piece.rank, piece.entry.name): item for piece, item in assign(self._pieces)}
        self._items = {(item.fqn, item.offsets): item for item in self._owners.values()}

    def _results(self, order: TakeStep) -> list[WriteResult]:
        return [_decode_result(node) for node in self._results_of(order, CheckpointStep.WRITE)["results"]]


def _unfinished(order: TakeStep) -> str:
    return storage_at(order.target).unfinished(checkpoint_format.name_of(Version(order.version)), order.attempt)


def _file(order: TakeStep, step: CheckpointStep, first: int) -> str:
    return f"{_unfinished(order)}/{step}-{first:05d}.json"


def _encode_result(result: WriteResult) -> list[Any]:
    index, stored = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, result.size_in_bytes, stored.relative_path, stored.offset, stored.length]


def _decode_result(node: list[Any]) -> WriteResult:
    fqn, offset, size, path, begin, length = node
    index = MetadataIndex(fqn, None if offset is None else tuple(offset))
    return WriteResult(index, size, checkpoints.storage_info(path, begin, length))
