"""Writes a durable checkpoint from copies of slots: with torch's own writers, and our record last."""

import io
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from deadpool_run.ids import Rank, Version
from deadpool_run.vault import checkpoint_format, segments
from deadpool_run.vault.checkpoint_format import Part, PartPlace, PartStamp
from deadpool_run.worker.checkpoint.plan import (
    Path,
    Piece,
    fqn_of,
    modules_by_optimizer,
    parameter_key,
)
from deadpool_run.worker.checkpoint.slots import SlotCopy
from deadpool_run.worker.checkpoint.storage import Storage
from deadpool_run.worker.codec import TreeReader
from deadpool_run.worker.snapshot.slot_memory import dtype_of

Owners = Mapping[tuple[Rank, str], Piece]
"""By rank and tensor: the piece that is written for it."""
Where = tuple[str, tuple[int, ...]]
"""A tensor's name in the checkpoint, and the start of the piece in it."""
Items = Mapping[Where, Piece]
Places = Mapping[Where, PartPlace]


def write_part(storage: Storage, unfinished: str, part: Part) -> PartStamp:
    """Write a rank's part; return its stamp for the record."""
    data = checkpoint_format.encode_part(part)
    storage.put(f"{unfinished}/{checkpoint_format.part_name(part.rank)}", data)
    return PartStamp(part.rank, len(data), segments.digest_of(data).hex())


def prune(storage: Storage, newest: Version, keep: int) -> None:
    """Remove all that is older than the newest `keep` checkpoints up to this version. One without a record does not count."""
    with storage.cleaning(""):
        known = [version for version in checkpoint_format.versions_in(storage.names()) if version <= newest]
        good = [version for version in known if storage.has_record(checkpoint_format.name_of(version))]
        for version in known:
            if len(good) >= keep and version < good[-keep]:
                storage.remove(checkpoint_format.name_of(version))


# --- torch's files, written in the steps of `dcp.save` --------------------------------------------------------------------


def write_items(
    writer: Any, world_size: int, copies: Sequence[SlotCopy], items: Items, objects: Mapping[Path, Any]
) -> list[WriteResult]:
    """Write the items that these ranks own, and the objects with those of the first rank."""
    own = {copy.rank: copy for copy in copies}
    named = {fqn_of(path): value for path, value in objects.items()}

    def data_of(item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type is WriteItemType.BYTE_IO:
            buffer = io.BytesIO()
            torch.save(named[item.index.fqn], buffer)
            return buffer
        piece = items[item.index.fqn, tuple(item.index.offset or ())]
        return own[piece.rank].view(piece.entry)

    planner = SimpleNamespace(resolve_data=data_of)  # torch's writers call nothing else of a `SavePlanner`
    plans = [_plan(Rank(rank), items.values(), {} if rank else objects) for rank in range(world_size)]
    writer.set_up_storage_writer(is_coordinator=True)
    plans = writer.prepare_global_plan([writer.prepare_local_plan(plan) for plan in plans])
    return [result for rank in own for result in writer.write_data(plans[rank], planner).wait()]


def write_metadata(writer: Any, items: Items, paths: Iterable[Path], results: Sequence[WriteResult]) -> None:
    """Write torch's `.metadata` for these items, and for objects with these paths."""
    found: dict[str, Any] = {}
    keys: dict[str, Path] = {}
    for piece in items.values():
        keys[piece.fqn] = piece.path
        kept = found.setdefault(
            piece.fqn, metadata.TensorStorageMetadata(_properties(piece), torch.Size(piece.size), [])
        )
        kept.chunks.append(_chunk(piece))
    for path in paths:
        keys[fqn_of(path)] = path
        found[fqn_of(path)] = metadata.BytesStorageMetadata()
    writer.set_up_storage_writer(is_coordinator=True)
    writer.finish(metadata.Metadata(found, planner_data=keys), [list(results)])


def places_of(items: Items, results: Iterable[WriteResult]) -> Places:
    """Return the items' places in torch's files."""
    places: dict[Where, PartPlace] = {}
    for result in results:
        where = (result.index.fqn, tuple(result.index.offset or ()))
        if (piece := items.get(where)) is not None:
            stored = result.storage_data
            places[where] = PartPlace(stored.relative_path, stored.offset, stored.length, piece.digest)
    return places


def _plan(rank: Rank, items: Iterable[Piece], objects: Iterable[Path]) -> SavePlan:
    written = [
        WriteItem(
            index=metadata.MetadataIndex(piece.fqn, piece.offsets),
            type=WriteItemType.SHARD if piece.sharded else WriteItemType.TENSOR,
            tensor_data=TensorWriteData(_chunk(piece), _properties(piece), torch.Size(piece.size)),
        )
        for piece in items
        if piece.rank == rank
    ]
    plain = [WriteItem(index=metadata.MetadataIndex(fqn_of(path)), type=WriteItemType.BYTE_IO) for path in objects]
    return SavePlan([*written, *plain])


def _chunk(piece: Piece) -> metadata.ChunkStorageMetadata:
    return metadata.ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.entry.shape))


def _properties(piece: Piece) -> metadata.TensorProperties:
    return metadata.TensorProperties(dtype=dtype_of(piece.entry.dtype))


def part_of(copy: SlotCopy, owners: Owners, places: Places) -> Part:
    """Return the rank's part, which restores its slot."""
    entries = copy.manifest.tensors
    found = [owners.get((copy.rank, entry.name)) for entry in entries]
    tail = max((entry.offset + entry.nbytes for entry in entries), default=segments.HEADER_BYTES)
    return Part(
        rank=copy.rank,
        version=Version(copy.header.version),
        tail_offset=tail,
        places=tuple(None if item is None else places[item.fqn, item.offsets] for item in found),
        manifest=copy.raw(copy.header.manifest_offset, copy.header.manifest_bytes),
        tail=copy.raw(tail, copy.header.manifest_offset - tail),
    )


class _WithoutClasses(TreeReader):
    """Returns what torch's loader reads with `weights_only`: lists for deques, dicts for objects, names for members of enumerations."""

    def of_class(self, tag: str, node: dict[str, Any], like: Any) -> Any:
        """Return such a value."""
        return node["is"][-1] if tag == "enum" else self.decode(node["is"], like)


def hyperparameters(copy: SlotCopy) -> dict[Path, Any]:
    """Return the hyper-parameters of the first rank's optimizers by path.

    A manifest does not have the parameters of a group; in an optimizer with one group they are those with state.
    """
    manifest = copy.manifest
    reader = _WithoutClasses(
        blob=lambda index: copy.raw(*manifest.blobs[index]),
        tensor=lambda index, _like: copy.view(manifest.value_tensors[index]).clone(),
    )
    owned = modules_by_optimizer(manifest)
    found: dict[Path, Any] = {}
    for name, node in manifest.values["optimizers"].items():
        groups = reader.decode(node)
        for number, group in enumerate(groups):
            for key, value in group.items():
                found[name, "param_groups", number, str(key)] = value
        if len(groups) == 1:
            named = dict.fromkeys(
                entry.name.removeprefix(f"{name}/").rpartition("/")[0]
                for entry in manifest.tensors
                if entry.role is segments.SlotRole.OPTIMIZER and entry.name.startswith(f"{name}/")
            )
            found[name, "param_groups", 0, "params"] = [parameter_key(each, owned[name]) for each in named]
    return found
