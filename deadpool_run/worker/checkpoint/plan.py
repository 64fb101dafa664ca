"""Assigns each rank's tensors to items of a torch.distributed.checkpoint.

Names are those of a script's own `dcp.save({"model": ..., "optimizer": get_optimizer_state_dict(...)})`:
`model.0.weight`, `optimizer.state.0.weight.exp_avg`. Shards are chunks of one global tensor. A tensor that is equal, byte for
byte, on several ranks is written once. If tensors of one name differ (pipeline stages that count their layers from 0,
different buffers), the first rank's has that name, and those of other ranks have a prefix like `rank00001.`.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from deadpool_run.ids import Rank
from deadpool_run.vault import segments
from deadpool_run.vault.segments import Manifest, Placement, SlotRole, TensorEntry
from deadpool_run.worker.checkpoint.slots import SlotCopy
from deadpool_run.worker.compat import checkpoints
from deadpool_run.worker.compat.placements import parse_placements

Path = tuple[str | int, ...]
"""An item's keys in the nested state dict; joined by dots they are its name."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of one rank, with its item in the checkpoint if no other tensor conflicts."""

    rank: Rank
    entry: TensorEntry
    path: Path
    offsets: tuple[int, ...]
    size: tuple[int, ...]
    """Of the whole tensor; `offsets` is the start of this piece in it."""
    digest: str

    @property
    def sharded(self) -> bool:
        """Whether it is a chunk of a tensor, of which other ranks may have other chunks."""
        return self.entry.placement is not None and self.path[0] != private(self.rank)

    @property
    def fqn(self) -> str:
        """The item's name."""
        return fqn_of(self.path)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Equal for all pieces of one tensor."""
        mesh = self.entry.placement.mesh if self.sharded and self.entry.placement else None
        return self.entry.dtype, self.size, mesh

    @property
    def content(self) -> tuple[Any, ...]:
        """Equal for pieces of which only one is written."""
        return self.digest, self.entry.shape, self.entry.stride


def survey(copy: SlotCopy, pool: Executor) -> list[Piece]:
    """Return the pieces of a rank's copy in the manifest's order, without empty ones."""
    entries = [entry for entry in copy.manifest.tensors if entry.nbytes]
    owned = modules_by_optimizer(copy.manifest)

    def piece(entry: TensorEntry) -> Piece:
        digest = segments.digest_of(memoryview(copy.memory)[entry.offset : entry.offset + entry.nbytes]).hex()
        origin = (0,) * len(entry.shape)
        whole = Piece(copy.rank, entry, _path_of(entry, owned), origin, entry.shape, digest)
        if entry.placement is None:
            return whole
        offsets = _offsets(entry, entry.placement)
        return _alone(whole) if offsets is None else replace(whole, offsets=offsets, size=entry.placement.shape)

    return list(pool.map(piece, entries))


def assign(pieces: Iterable[Piece]) -> Iterator[tuple[Piece, Piece]]:
    """Yield each piece with the piece that is written for it: itself, an equal one, or itself under a private name.

    A pure function of the ordered pieces of all ranks, so that all nodes come to the same result.
    """
    tensors: dict[str, tuple[Any, ...]] = {}
    chunks: dict[tuple[str, tuple[int, ...]], Piece] = {}
    for piece in pieces:
        known = tensors.setdefault(piece.fqn, piece.signature)
        item = chunks.setdefault((piece.fqn, piece.offsets), piece) if known == piece.signature else None
        if item is None or item.content != piece.content:
            alone = _alone(piece)
            item = chunks.setdefault((alone.fqn, alone.offsets), alone)
        yield piece, item


def fqn_of(path: Path) -> str:
    """Return the name of the item with these keys."""
    return ".".join(map(str, path))


def private(rank: Rank) -> str:
    """Return the first key of this rank's private items."""
    return f"rank{rank:05d}"


def modules_by_optimizer(manifest: Manifest) -> dict[str, set[str]]:
    """Return for each optimizer the modules of the parameters it has state for."""
    found: dict[str, set[str]] = {name: set() for name in manifest.values["optimizers"]}
    for entry in manifest.tensors:
        if entry.role is SlotRole.OPTIMIZER:
            optimizer, module, _ = entry.name.split("/", 2)
            found.setdefault(optimizer, set()).add(module)
    return found


def parameter_key(parameter: str, modules: set[str]) -> str:
    """Return a parameter's key in an optimizer's state; without the module's name if there is only one module."""
    return parameter.partition("/")[2] if len(modules) == 1 else parameter


def _path_of(entry: TensorEntry, owned: dict[str, set[str]]) -> Path:
    owner, _, rest = entry.name.partition("/")
    if entry.role is not SlotRole.OPTIMIZER:
        return owner, rest
    parameter, _, key = rest.rpartition("/")
    return owner, "state", parameter_key(parameter, owned[owner]), key


def meshes(entries: Iterable[TensorEntry]) -> tuple[str, ...]:
    """Describe every mesh of the sharded tensors."""
    found = {entry.placement for entry in entries if entry.placement is not None}
    return tuple(sorted({f"{'x'.join(map(str, at.mesh))} {','.join(at.names or ('unnamed',))}" for at in found}))


def _alone(piece: Piece) -> Piece:
    """Return the piece as a private tensor."""
    path, shape = (private(piece.rank), *piece.path), piece.entry.shape
    return replace(piece, path=path, offsets=(0,) * len(shape), size=shape)


def _offsets(entry: TensorEntry, at: Placement) -> tuple[int, ...] | None:
    known = parse_placements(at.placements)
    if known is None or len(at.at) != len(at.mesh):
        return None
    shape, offsets = checkpoints.shape_and_offsets(at.shape, at.mesh, at.at, known)
    return offsets if shape == entry.shape else None
