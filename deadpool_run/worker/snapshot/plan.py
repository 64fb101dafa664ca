"""The layout of a snapshot: which live tensor is copied to which bytes of a slot."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from deadpool_run.errors import ScriptError
from deadpool_run.vault.segments import HEADER_BYTES, Placement, SlotRole, TensorEntry, aligned
from deadpool_run.wire.typed import to_json
from deadpool_run.worker.compat.modules import buffers_of, is_wrapper, local, shard_of, writes_of
from deadpool_run.worker.snapshot.slot_memory import SlotMemory, copy_each
from deadpool_run.worker.state.digest import are_equal
from deadpool_run.worker.state.optimizers import Tracked
from deadpool_run.worker.state.protected import Protected

_MOST_PROBES = 8
_PROBED = 16
"""Elements of a parameter, the first ones in memory."""


def placement_of(tensor: Tensor) -> Placement | None:
    """Return where a DTensor's shard belongs; None for any other tensor."""
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    return Placement(
        mesh=tuple(mesh.shape),
        names=mesh.mesh_dim_names,
        at=tuple(mesh.get_coordinate() or ()),
        placements=tuple(map(str, tensor.placements)),
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
    )


def describe(tracked: Tracked, offset: int) -> TensorEntry:
    """Return the manifest's entry of a live tensor. Raises `ScriptError` if it is not dense and in memory."""
    own = local(tracked.tensor) if tracked.role is SlotRole.PARAMETER else shard_of(tracked.tensor)
    wrapped = is_wrapper(own)  # a variable, because mypy thinks that no tensor is one
    if wrapped or own.layout is not torch.strided or own.is_quantized or own.is_meta:
        raise ScriptError(
            f"{tracked.name} is a {type(own).__name__} of layout {own.layout} on {own.device}, which a snapshot cannot hold.\n"
            "Only dense tensors in memory can be protected."
        )
    return TensorEntry(
        name=tracked.name,
        role=tracked.role,
        dtype=str(own.dtype).removeprefix("torch."),
        shape=tuple(own.shape),
        # A dense layout is kept (channels last, say), so that the copy is one memory move; any other layout is packed.
        stride=tuple(torch.empty_like(own, device="meta").stride()),
        device=own.device.type,
        offset=offset,
        nbytes=own.nbytes,
        placement=placement_of(tracked.tensor),
    )


def live_tensors(protected: Protected) -> dict[str, Tracked]:
    """Return all parameters, optimizer state and buffers by name."""
    found = {tracked.name: tracked for tracked in protected.heavy()}
    return found | {tracked.name: tracked for tracked, _, _ in protected.buffers()}


def lay_out(tensors: Iterable[Tracked], offset: int) -> tuple[list[TensorEntry], int]:
    """Return the entries of `tensors`, one after the other from `offset`, and the first offset after them."""
    entries = []
    for tracked in tensors:
        entry = describe(tracked, aligned(offset))
        entries.append(entry)
        offset = entry.offset + entry.nbytes
    return entries, aligned(offset)


class BufferCopies:
    """Our own copy of all buffers, on their devices, taken at the end of each step."""

    def __init__(self) -> None:
        self.layout_version = 0
        """Grows when a buffer's name, dtype, shape, stride or device has changed."""
        self.tracked: list[Tracked] = []
        """The live buffers when the layout was last read, for their names and placements."""
        self.copies: list[Tensor] = []
        self._owners: list[tuple[torch.nn.Module, str]] = []
        self._groups: list[list[int]] = []
        self._seen: list[tuple[Any, ...]] = []
        self._layouts: list[tuple[Any, ...]] = []
        self._sharded = False

    def take(self, protected: Protected) -> None:
        """Copy every buffer."""
        values = protected.buffer_values()
        seen = [(id(value), *_form(value)) for value in values]
        if seen != self._seen:  # no id is used again while `tracked` keeps its tensor
            self._read_layout(protected)
            self._seen = seen
            self._sharded = any(isinstance(value, DTensor) for value in values)
        own = [local(value) for value in values] if self._sharded else values
        for group in self._groups:
            copy_each([self.copies[i] for i in group], [own[i] for i in group])

    def put_back(self) -> None:
        """Put the buffers of the last copy back in their places, in their shapes.

        A step may have put others there, which are in use elsewhere, or changed a shape in place.
        """
        for (module, key), tracked, copy in zip(self._owners, self.tracked, self.copies, strict=True):
            buffers_of(module)[key] = tracked.tensor
            own = local(tracked.tensor)
            if _form(own) != _form(copy):
                own.data = torch.empty_like(copy)

    def put(self) -> None:
        """Set every buffer to its copied value."""
        self.put_back()
        copy_each([local(tracked.tensor) for tracked in self.tracked], self.copies)

    def _read_layout(self, protected: Protected) -> None:
        buffers = list(protected.buffers())
        tracked = [buffer for buffer, _, _ in buffers]
        layouts = list(map(_layout, tracked))
        if layouts != self._layouts:
            self.layout_version, self._layouts = self.layout_version + 1, layouts
            self.copies = [torch.empty_like(local(buffer.tensor).detach()) for buffer in tracked]
            groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
            for index, copy in enumerate(self.copies):
                groups.setdefault((copy.device, copy.dtype), []).append(index)
            self._groups = list(groups.values())
        self.tracked = tracked
        self._owners = [(module, key) for _, module, key in buffers]


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """Return what a step can change of a buffer in place, other than its values. Cheap."""
    return tensor.shape, tensor.dtype


def _layout(tracked: Tracked) -> tuple[Any, ...]:
    own = local(tracked.tensor)
    return tracked.name, own.dtype, own.shape, own.stride(), own.device


class CapturePlan:
    """The live tensors of a snapshot and their places in a slot. Made again when it no longer `holds`."""

    def __init__(self, protected: Protected, buffers: BufferCopies) -> None:
        self.has_plain = protected.has_plain()
        """Whether optimizers keep state that is not a plain tensor."""
        parameters = protected.parameters()
        self.parameters = list(parameters.values())
        self.names = {id(parameter): name for name, parameter in parameters.items()}
        self._fingerprint = protected.fingerprint(plain=self.has_plain)
        self._layout_version = buffers.layout_version
        heavy = list(protected.heavy())
        self.entries, self.end = lay_out([*heavy, *buffers.tracked], HEADER_BYTES)
        self.encoded = to_json(self.entries)
        # Detached views keep the storage alive; the live tensors are kept so that no other object gets their id().
        self._alive = [tracked.tensor for tracked in heavy]
        own = [local(tracked.tensor).detach() for tracked in heavy]
        self.sources = [*own, *buffers.copies]
        self._watched = [tensor for tensor in own if not tensor.is_inference()]
        self.cuda_devices = {source.device for source in self.sources if source.is_cuda}
        self._views: dict[int, tuple[int, list[Tensor], list[list[Tensor]]]] = {}
        """By slot: the version of its mapping, the targets, and the bytes of those that are probed."""
        self._probed: dict[torch.device, list[int]] = {}
        for index in filter(self._is_dense, _spread(len(parameters))):
            self._probed.setdefault(self.sources[index].device, []).append(index)
        self._probes = self._first_bytes(self.sources)

    def holds(self, protected: Protected, buffers: BufferCopies) -> bool:
        """Return whether nothing was added, replaced or moved since the plan was made."""
        return (
            self._layout_version == buffers.layout_version
            and protected.fingerprint(plain=self.has_plain) == self._fingerprint
        )

    def _is_dense(self, index: int) -> bool:
        source = self.sources[index]
        return source.numel() > 0 and source.stride() == self.entries[index].stride

    def _first_bytes(self, tensors: list[Tensor]) -> list[list[Tensor]]:
        """Return the first bytes of the probed ones of `sources` or of their targets, by the device of the source."""
        return [[_first(tensors[index]).view(torch.uint8) for index in group] for group in self._probed.values()]

    def probe(self) -> list[Tensor]:
        """Return copies of a few elements of some parameters, as they are now: one tensor for each device. Takes some microseconds."""
        return list(map(torch.cat, self._probes))

    def has_probes(self, memory: SlotMemory, probes: list[Tensor]) -> bool:
        """Return whether a slot has what `probe` has returned, in main memory, bit for bit. None are no evidence."""
        kept = self._views_of(memory)[1] if probes else []
        return all(torch.equal(torch.cat(one), other) for one, other in zip(kept, probes, strict=True))

    def write_counts(self) -> list[int]:
        """Return how often each parameter and each tensor of an optimizer's state has been written in place."""
        return list(map(writes_of, self._watched))

    def is_equal_to(self, memory: SlotMemory) -> bool:
        """Return whether parameters and optimizer state are equal to those in a slot: whole, or on a device, samples of them."""
        return all(
            are_equal(source, kept)
            for source, kept, entry in zip(self.sources, self.targets(memory), self.entries, strict=True)
            if entry.role in (SlotRole.PARAMETER, SlotRole.OPTIMIZER)
        )

    def targets(self, memory: SlotMemory) -> list[Tensor]:
        """Return the places of `sources` in a slot."""
        return self._views_of(memory)[0]

    def _views_of(self, memory: SlotMemory) -> tuple[list[Tensor], list[list[Tensor]]]:
        version, views, probed = self._views.get(memory.fd, (0, [], []))
        if version != memory.mapping_version:
            views = [memory.view(entry) for entry in self.entries]
            probed = self._first_bytes(views)
            self._views[memory.fd] = memory.mapping_version, views, probed
        return views, probed


def _spread(count: int) -> list[int]:
    """Return up to `_MOST_PROBES` of the first `count` numbers, the first and the last among them."""
    step = max(1, -(-(count - 1) // (_MOST_PROBES - 1)))
    return [*range(0, count - 1, step), *range(count)[-1:]]


def _first(tensor: Tensor) -> Tensor:
    return tensor.as_strided((min(_PROBED, tensor.numel()),), (1,), tensor.storage_offset())
