"""Writing a snapshot: the memory of a slot, our own copy of the buffers, and the plan that says which bytes go where."""

import ctypes
import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from deadpool_run.errors import ScriptError, SnapshotError
from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.segments import (
    HEADER_BYTES,
    Placement,
    SegmentState,
    SlotHeader,
    SlotRole,
    TensorEntry,
    aligned,
)
from deadpool_run.worker.codec import TreeWriter
from deadpool_run.worker.compat.modules import buffers_of, copy_all, is_wrapper, local, writes_of
from deadpool_run.worker.state.optimizers import NO_PLAIN, Tracked
from deadpool_run.worker.state.rng import RngStates, rng_tree
from deadpool_run.worker.state.state import Protected

_LOG = logging.getLogger("deadpool_run")
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_LIBC = ctypes.CDLL(None, use_errno=True)


class SlotMemory:
    """The bytes of one slot, mapped. Holds a duplicate of the descriptor that it is given."""

    def __init__(self, fd: int) -> None:
        self.fd = os.dup(fd)
        self.generation = 0
        """Grows when the slot is mapped anew: views of an older generation show memory that is no longer the slot's
        (they keep it alive, so that using one is no crash)."""
        self._base: Tensor | None = None
        self._pinned: bool | None = None
        """Whether CUDA has registered the mapping; None: it was not asked to."""

    def ensure(self, nbytes: int, *, pin_for: torch.device | None = None) -> None:
        """Map at least `nbytes` bytes, growing the file if it is smaller; register them for a CUDA device's copies."""
        if self._base is None or self._base.numel() < nbytes:
            self._unpin()
            self._base = self._mapped(nbytes)
            self.generation += 1
        if pin_for is not None and self._pinned is None:
            # Portable (1): for every device. A refusal is no error: the copies are still right, only slower.
            with torch.cuda.device(pin_for):  # else this thread would open a context on the first device
                result = torch.cuda.cudart().cudaHostRegister(self._base.data_ptr(), self._base.numel(), 1)
            self._pinned = int(result) == 0

    def view(self, entry: TensorEntry) -> Tensor:
        """Return the entry's bytes as a tensor of its dtype, shape and stride."""
        assert self._base is not None
        flat = self._base[entry.offset : entry.offset + entry.nbytes].view(dtype_of(entry.dtype))
        return flat.as_strided(entry.shape, entry.stride, flat.storage_offset())

    def close(self) -> None:
        """Give back the mapping (once the last view is gone) and our descriptor; the slot's content stays."""
        self._unpin()
        self._base = None
        os.close(self.fd)

    def _mapped(self, nbytes: int) -> Tensor:
        size = max(nbytes, os.fstat(self.fd).st_size)
        size = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        if size > os.fstat(self.fd).st_size:
            os.ftruncate(self.fd, size)
        base = torch.frombuffer(mmap.mmap(self.fd, size), dtype=torch.uint8)  # keeps the mapping alive
        _populate(base)
        return base

    def _unpin(self) -> None:
        if self._pinned and self._base is not None:
            torch.cuda.cudart().cudaHostUnregister(self._base.data_ptr())
        self._pinned = None


def _populate(base: Tensor) -> None:
    """Have the kernel make every page now, so that no capture pays for it: a first touch costs ten times a copy.

    Through ctypes, because `mmap.madvise` would hold the interpreter's lock for the whole time.
    """
    where, nbytes = ctypes.c_void_p(base.data_ptr()), ctypes.c_size_t(base.numel())
    _LIBC.madvise(where, nbytes, _MADV_HUGEPAGE)  # a wish: kernels without huge pages for shared memory refuse it
    if _LIBC.madvise(where, nbytes, _MADV_POPULATE_WRITE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):  # those are an older kernel's: there, pages come at first touch
        raise SnapshotError(
            f"there is no memory for a snapshot of {base.numel() / 2**30:.1f} GiB: {os.strerror(number)}.\n"
            "Each rank needs twice the size of its parameters and optimizer state on its own node."
        )


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that a manifest names. Raises `SnapshotError`."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise SnapshotError(f"a snapshot names {name!r}, which is no dtype of this torch")
    return dtype


def placement_of(tensor: Tensor) -> Placement | None:
    """Return where a DTensor's shard belongs; None for any other tensor."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names
    return Placement(
        mesh=tuple(mesh.shape),
        names=None if names is None else tuple(names),
        at=tuple(mesh.get_coordinate() or ()),
        placements=tuple(map(str, tensor.placements)),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def describe(tracked: Tracked, offset: int) -> TensorEntry:
    """Return the manifest's entry of a live tensor. Raises `ScriptError` for one that is not plain bytes."""
    own = local(tracked.tensor)
    kind = type(own).__name__
    wrapped = is_wrapper(own)
    if wrapped or own.layout is not torch.strided or own.is_quantized or own.is_meta:
        raise ScriptError(
            f"{tracked.name} is a {kind} of layout {own.layout} on {own.device}, which a snapshot cannot hold.\n"
            "Only dense tensors in memory can be protected."
        )
    # A dense layout is kept as it is (channels last), so that a copy is one move of memory; any other is packed.
    stride = torch.empty_like(own, device="meta").stride()
    return TensorEntry(
        name=tracked.name,
        role=tracked.role,
        dtype=str(own.dtype).removeprefix("torch."),
        shape=tuple(own.shape),
        stride=tuple(stride),
        device=own.device.type,
        offset=offset,
        nbytes=own.numel() * own.element_size(),
        placement=placement_of(tracked.tensor),
    )


def lay_out(tensors: Iterable[Tracked], offset: int) -> tuple[list[TensorEntry], int]:
    """Return the entries of `tensors`, one behind the other from `offset`, and the first offset behind them."""
    entries = []
    for tracked in tensors:
        entry = describe(tracked, aligned(offset))
        entries.append(entry)
        offset = entry.offset + entry.nbytes
    return entries, aligned(offset)


def copy_each(targets: list[Tensor], sources: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source into its target: one call, that needs the interpreter's lock only to begin."""
    if targets:
        with torch.no_grad():
            copy_all(targets, sources, non_blocking=non_blocking)


class Staging:
    """Our own copy of the buffers, on their devices, made at once at the end of a step."""

    def __init__(self) -> None:
        self.generation = 0
        """Grows when the buffers are no longer the same in name, dtype, shape or device."""
        self.tracked: list[Tracked] = []
        """The live buffers when they were last looked at, for their names and placements."""
        self.staged: list[Tensor] = []
        self._owners: list[tuple[torch.nn.Module, str]] = []
        self._groups: list[list[int]] = []
        self._ids: list[int] = []
        self._sharded = False

    def take(self, protected: Protected) -> None:
        """Copy every buffer."""
        values = protected.buffer_values()
        if list(map(id, values)) != self._ids:  # no id is used again while `tracked` keeps its owner
            self._look_again(protected, values)
            self._ids = list(map(id, values))
            self._sharded = any(isinstance(value, DTensor) for value in values)
        own = [local(value) for value in values] if self._sharded else values
        for group in self._groups:
            copy_each([self.staged[i] for i in group], [own[i] for i in group])

    def put(self) -> None:
        """Give the buffers their copied values again."""
        targets, sources = [], []
        for (module, key), tracked, staged in zip(self._owners, self.tracked, self.staged, strict=True):
            live = buffers_of(module).get(key)  # a buffer may be None or of another shape by now
            if live is None or local(live).shape != staged.shape or local(live).dtype != staged.dtype:
                local(tracked.tensor).copy_(staged)
                buffers_of(module)[key] = tracked.tensor
            else:
                targets.append(local(live))
                sources.append(staged)
        copy_each(targets, sources)

    def _look_again(self, protected: Protected, values: list[Tensor]) -> None:
        owners = list(protected.buffers())
        names = [name for name, _, _ in owners]
        tracked = [Tracked(name, SlotRole.BUFFER, value) for name, value in zip(names, values, strict=True)]
        if [_likeness(t) for t in tracked] != [_likeness(t) for t in self.tracked]:
            self.generation += 1
            self.staged = [torch.empty_like(local(value).detach()) for value in values]
            groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for index, staged in enumerate(self.staged):
                groups.setdefault((staged.device, staged.dtype), []).append(index)
            self._groups = list(groups.values())
        self.tracked = tracked
        self._owners = [(module, key) for _, module, key in owners]


def _likeness(tracked: Tracked) -> tuple[Any, ...]:
    own = local(tracked.tensor)
    return tracked.name, own.dtype, own.shape, own.stride(), own.device


class CapturePlan:
    """Which live tensors go where in a slot. Made once, and again when it no longer `holds`."""

    def __init__(self, protected: Protected, staging: Staging) -> None:
        self.has_plain = protected.has_plain()
        """Whether optimizers keep state that is not a tensor."""
        parameters = protected.parameters()
        self.parameters = list(parameters.values())
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self._fingerprint = protected.fingerprint(plain=self.has_plain)
        self._staging_generation = staging.generation
        heavy = list(protected.heavy(self.names))
        entries, self.end = lay_out([*heavy, *staging.tracked], HEADER_BYTES)
        self.entries = entries
        self.encoded = segments.encode_entries(entries)
        # Detached tensors keep the memory of this moment, and the live tensors keep their identities from being
        # given to others.
        self._alive = [tracked.tensor for tracked in heavy]
        own = [local(tracked.tensor).detach() for tracked in heavy]
        self.sources = [*own, *staging.staged]
        self._watched = [tensor for tensor in own[: len(parameters)] if not tensor.is_inference()]
        self.cuda_devices = {source.device for source in self.sources if source.is_cuda}
        self._views: dict[int, tuple[int, list[Tensor]]] = {}

    def holds(self, protected: Protected, staging: Staging) -> bool:
        """Say whether nothing was added, replaced or moved since the plan was made."""
        return (
            self._staging_generation == staging.generation
            and protected.fingerprint(plain=self.has_plain) == self._fingerprint
        )

    def write_counts(self) -> list[int]:
        """Return how often each parameter has been written in place."""
        return list(map(writes_of, self._watched))

    def targets(self, memory: SlotMemory) -> list[Tensor]:
        """Return the places of `sources` in a slot."""
        generation, views = self._views.get(memory.fd, (0, []))
        if generation != memory.generation:
            views = [memory.view(entry) for entry in self.entries]
            self._views[memory.fd] = memory.generation, views
        return views


@dataclass(slots=True)
class StateCapture:
    """One snapshot on its way into a slot."""

    version: Version
    plan: CapturePlan
    values: dict[str, Any]
    rng: RngStates
    write_counts: list[int]
    """Of `plan.write_counts()` when the step ended."""
    ready: tuple[torch.cuda.Event, ...]
    """Recorded on the streams that the script used when the step ended; empty without CUDA."""
    ended: bool
    """Whether the step's kernels had ended by then, so that no later interruption can have spoilt them."""


class Writer:
    """Writes captures into slots, on one thread."""

    def __init__(self, protected: Protected, rank: Rank, interrupted: Callable[[], bool]) -> None:
        self._protected = protected
        self._interrupted = interrupted
        self._rank = rank
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def write(self, memory: SlotMemory, capture: StateCapture) -> bool:
        """Write the slot and call it complete; return False if the tensors were not those of the step's end."""
        segments.mark_busy(memory.fd)
        plan, tree = capture.plan, TreeWriter()
        values = self._values(capture, tree)
        value_tensors = [Tracked(str(i), SlotRole.VALUE, tensor) for i, tensor in enumerate(tree.tensors)]
        value_entries, end = lay_out(value_tensors, plan.end)
        memory.ensure(end, pin_for=next(iter(plan.cuda_devices), None))
        targets = plan.targets(memory) + [memory.view(entry) for entry in value_entries]
        for event in capture.ready:
            event.synchronize()
        if not capture.ended and self._interrupted():
            return False  # kernels of the step may have worked on what an aborted collective left
        self._copy(targets, plan.sources + [local(t) for t in tree.tensors])
        if plan.write_counts() != capture.write_counts:
            _LOG.warning("snapshot %d is skipped: parameters were written outside of optimizer.step()", capture.version)
            return False
        blobs = []
        offset = end
        for blob in tree.blobs:
            blobs.append((offset, len(blob)))
            offset += len(blob)
        manifest = segments.encode_manifest(
            version=capture.version,
            rank=self._rank,
            tensors=plan.encoded,
            value_tensors=segments.encode_entries(value_entries),
            blobs=blobs,
            values=values,
        )
        segments.write_all(memory.fd, b"".join((*tree.blobs, manifest)), end)
        digest = segments.digest_of(manifest)
        header = SlotHeader(SegmentState.COMPLETE, capture.version, offset, len(manifest), digest)
        segments.write_header(memory.fd, header)
        return True

    def _values(self, capture: StateCapture, tree: TreeWriter) -> dict[str, Any]:
        """Return the JSON of everything small."""
        names = capture.plan.names
        plain: dict[str, Any] = {}
        for name, optimizer in self._protected.optimizers.items():
            plain[name] = optimizer.plain(names) if capture.plan.has_plain else NO_PLAIN
        members = {
            name: [[names[id(parameter)] for parameter in group] for group in groups]
            for name, groups in capture.values["members"].items()
        }
        kept = {names[id(parameter)]: gradient for parameter, gradient in capture.values["gradients"]}
        by_name = capture.values | {"members": members, "gradients": kept}
        values = {part: _encode_part(part, by_name[part], tree) for part in by_name}
        values["plain"] = {name: tree.encode(state, f"the state of {name!r}") for name, state in plain.items()}
        values["rng"] = tree.encode(rng_tree(capture.rng), "the generators")
        return values

    def _copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        """Copy, and return when every byte has arrived."""
        groups: dict[torch.device, list[int]] = {}
        for index, source in enumerate(sources):
            groups.setdefault(source.device, []).append(index)
        for device, group in groups.items():
            there, here = [targets[i] for i in group], [sources[i] for i in group]
            if device.type != "cuda":
                copy_each(there, here)
                continue
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            with torch.cuda.stream(self._streams[device]):
                copy_each(there, here, non_blocking=True)
        for stream in self._streams.values():
            stream.synchronize()


def _encode_part(part: str, values: dict[str, Any], tree: TreeWriter) -> dict[str, Any]:
    return {name: tree.encode(value, f"the state of {name!r} ({part})") for name, value in values.items()}
