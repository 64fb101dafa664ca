"""Writes a captured state into a slot, on the copy thread."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deadpool_run.ids import Rank, Version
from deadpool_run.vault import segments
from deadpool_run.vault.segments import SlotRole
from deadpool_run.wire.typed import to_json
from deadpool_run.worker.codec import TreeWriter
from deadpool_run.worker.compat.modules import local
from deadpool_run.worker.device.backend import Mark
from deadpool_run.worker.snapshot.plain_state import PlainState
from deadpool_run.worker.snapshot.plan import CapturePlan, lay_out
from deadpool_run.worker.snapshot.slot_memory import SlotMemory, copy_each
from deadpool_run.worker.state.optimizers import Tracked
from deadpool_run.worker.state.protected import Protected

_LOG = logging.getLogger("deadpool_run")


class Events(NamedTuple):
    """Events on the streams of a thread. Without CUDA there are none."""

    place: int | None
    """The number of the thread's CUDA device."""
    events: tuple[torch.cuda.Event, ...]


@dataclass(slots=True)
class StateCapture:
    """A state to be written into a slot."""

    version: Version
    plan: CapturePlan
    values: dict[str, Any]
    plain: PlainState
    write_counts: list[int]
    """`plan.write_counts()` when the step ended."""
    probes: list[Tensor]
    """`plan.probe()` when the step ended."""
    ready: Events
    """Recorded on the streams that the script used when the step ended."""
    mark: Mark | None
    """Of the device that carries collectives, when the step ended."""
    ended: bool
    """Whether the step's kernels had ended by then: a later interruption cannot have made their results wrong."""


def events_now(devices: set[torch.device]) -> Events:
    """Record events on the thread's streams of its CUDA device, where variables may be, and of `devices`. A thread that waits for them sleeps."""
    if not torch.cuda.is_initialized():
        return Events(None, ())
    place = torch.cuda.current_device()
    streams = map(torch.cuda.current_stream, devices | {torch.device("cuda", place)})
    return Events(place, tuple(stream.record_event(torch.cuda.Event(blocking=True)) for stream in streams))


@dataclass(eq=False)
class Writer:
    """Writes captures into slots, on one thread."""

    protected: Protected
    rank: Rank
    interrupted: Callable[[], bool]
    last_bytes: int = 0
    """The size of the last capture."""
    _streams: dict[torch.device, torch.cuda.Stream] = field(default_factory=dict)
    _place: int | None = None

    def write(self, memory: SlotMemory, capture: StateCapture) -> bool:
        """Write the slot and mark it complete; return False if the tensors changed after the step's end."""
        place = capture.ready.place
        if place is not None and place != self._place:
            torch.cuda.set_device(place)  # of this thread: else torch opens a context on the first device
            self._place = place
        segments.mark_busy(memory.fd)
        plan, tree = capture.plan, TreeWriter()
        values = self._values(capture, tree)
        value_tensors = [Tracked(str(i), SlotRole.VALUE, tensor) for i, tensor in enumerate(tree.tensors)]
        value_entries, end = lay_out(value_tensors, plan.end)
        memory.ensure(end, pin_for=next(iter(plan.cuda_devices), None))
        targets = plan.targets(memory) + [memory.view(entry) for entry in value_entries]
        for event in capture.ready.events:
            event.synchronize()
        if capture.mark is not None:
            capture.mark.wait()
        if not capture.ended and self.interrupted():
            return False  # kernels of the step may have read the output of an aborted collective
        probes = [each if each.is_cpu else torch.empty_like(each, device="cpu") for each in capture.probes]
        moved = [(to, each) for to, each in zip(probes, capture.probes, strict=True) if to is not each]
        sources = [*plan.sources, *map(local, tree.tensors), *(each for _, each in moved)]
        self._copy([*targets, *(to for to, _ in moved)], sources)
        was_written = plan.write_counts() != capture.write_counts or capture.plain.was_written()
        if was_written or not plan.has_probes(memory, probes):
            _LOG.warning(
                "snapshot %d is skipped: the script wrote parameters or optimizer state outside of optimizer.step() while it was copied",
                capture.version,
            )
            return False
        sizes = list(map(len, tree.blobs))
        *offsets, manifest_offset = accumulate(sizes, initial=end)
        manifest = segments.encode_manifest(
            version=capture.version,
            rank=self.rank,
            tensors=plan.encoded,
            value_tensors=to_json(value_entries),
            blobs=list(zip(offsets, sizes, strict=True)),
            values=values,
        )
        segments.write_all(memory.fd, b"".join((*tree.blobs, manifest)), end)
        self.last_bytes = manifest_offset + len(manifest)
        segments.write_header(memory.fd, segments.complete_header(capture.version, manifest_offset, manifest))
        return True

    def _values(self, capture: StateCapture, tree: TreeWriter) -> dict[str, Any]:
        names = capture.plan.names
        members = {
            name: [[names[id(parameter)] for parameter in group] for group in groups]
            for name, groups in capture.values["members"].items()
        }
        gradients = capture.values["gradients"]
        kept = {names[id(each.parameter)]: each.gradient for each in gradients}
        in_buckets = [names[id(each.parameter)] for each in gradients if each.in_bucket]
        keeps = capture.values["keeps"] | {"in_buckets": in_buckets}
        for part in ("without", "lost"):
            keeps[part] = keeps[part] and [names[id(parameter)] for parameter in keeps[part]]
        own = {"members": members, "gradients": kept, "keeps": keeps}
        values: dict[str, Any] = {
            part: {name: tree.encode(value, f"the state of {name!r} ({part})") for name, value in by_name.items()}
            for part, by_name in (capture.values | own).items()
        }
        values["plain"] = {
            name: tree.encode(plain, f"the state of {name!r}") for name, plain in capture.plain.values.items()
        }
        return values

    def _copy(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        groups: dict[torch.device, list[int]] = {}
        for index, source in enumerate(sources):
            groups.setdefault(source.device, []).append(index)
        for device, group in groups.items():
            to, of = [targets[i] for i in group], [sources[i] for i in group]
            if device.type != "cuda":
                copy_each(to, of)
                continue
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            with torch.cuda.stream(self._streams[device]):
                copy_each(to, of, non_blocking=True)
        for stream in self._streams.values():
            stream.synchronize()
