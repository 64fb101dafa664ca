"""A process group that outlives its communicators: connected while all members live, fake otherwise."""

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deadpool_run.errors import ScriptError
from deadpool_run.worker.codec import tensors_in
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.compat.group_api import GroupApi
from deadpool_run.worker.groups import nccl
from deadpool_run.worker.groups.collectives import COALESCED, COLLECTIVES, Collective, Parts, answer
from deadpool_run.worker.groups.connect import EpochGroup, GroupSpec
from deadpool_run.worker.groups.owner import ANY_ATTEMPT, GroupOwner
from deadpool_run.worker.groups.works import FakeWork, GuardedWork, RecordedWork, ThreadedWork

_UNSLICED = frozenset(
    {
        *("send", "recv", "recv_anysource"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    }
)


class Group(GroupApi):
    """A deadpool group. `inner` is None while its collectives are fake.

    torch's C++ code calls the collectives of a Python group by name, and reads its name, rank and size.
    """

    def __init__(self, registry: GroupOwner, spec: GroupSpec) -> None:
        super().__init__(spec.rank, len(spec.ranks))  # type: ignore[call-arg] # the stub lacks this constructor
        self.registry = registry
        self.spec = spec
        self.inner: dist.ProcessGroup | None = None
        self.generation = 0
        """The registry's generation of communicators; a work belongs to the one on which it was issued."""
        self.destroyed = False
        self._epoch: EpochGroup | None = None
        self._nccl: Any = None
        self._nccl_lock = threading.Lock()
        self._may_see_cuda = nccl.available()
        self._name = spec.group
        self._description = "undefined"

    # --- attaching -------------------------------------------------------------------------------------------------

    def attach(self, inner: EpochGroup, generation: int) -> None:
        """Use these communicators from now on."""
        self.generation = generation
        self._epoch = inner
        self._nccl = None
        self.inner = inner.group

    def detach(self) -> tuple[EpochGroup | None, Any]:
        """Give fake results from now on; return the communicators and the NCCL backend, which the caller must free."""
        with self._nccl_lock:
            epoch, backend = self._epoch, self._nccl
            self.inner = self._epoch = self._nccl = None
        return epoch, backend

    def uncover(self) -> None:
        """Use the communicators again after a time without `inner`, unless they were detached meanwhile."""
        self.inner = None if self._epoch is None else self._epoch.group

    def _ensure_cuda(self) -> None:
        if self._nccl is not None:
            return
        with self._nccl_lock:
            epoch = self._epoch
            if epoch is not None and self._nccl is None:
                self._nccl = nccl.create(epoch.nccl_store, self.spec)
                c10d.add_cuda_backend(epoch.group, self._nccl)

    # --- collectives -----------------------------------------------------------------------------------------------

    @property
    def other_rank(self) -> int:
        """The rank of another member, if there is one."""
        return (self.spec.rank + 1) % len(self.spec.ranks)

    def answer(self, collective: Collective, parts: Parts) -> None:
        """Write the fake result."""
        answer(collective, parts, self.spec.rank, len(self.spec.ranks))

    def pretend(self, collective: Collective, parts: Parts) -> FakeWork:
        """Return a collective with the result in the played-back transcript, or else a fake one.

        Raises `ScriptError` if the script has destroyed the group.
        """
        if self.destroyed:
            raise ScriptError(
                f"{collective.name} was called on the process group {self._name!r} after destroy_process_group().\n"
                "Destroy a group after its last use."
            )
        self.registry.note_fake()
        self.answer(collective, parts)
        source = self.other_rank
        if (transcript := self.registry.playback) is not None:
            entry = transcript.play(self._name, collective.name, collective.outputs(parts))
            if entry is not None and entry.source is not None:
                source = entry.source
        return FakeWork(self, collective, parts, source)

    def issue_cuda(self, target: str, collective: Collective, args: Parts, kwargs: dict[str, Any], parts: Parts) -> Any:
        """Issue on NCCL. Returns NCCL's own work; it counts as waited for at once, because the host never waits for it."""
        registry = self.registry
        inner = self.inner
        if torch.cuda.is_current_stream_capturing():
            raise ScriptError(
                f"{collective.name} was called while a CUDA graph is captured: the graph would keep communicators that a repair "
                "replaces.\nMove collectives out of the graph, or capture it without deadpool_run.init()."
            )
        try:
            self._ensure_cuda()
            if inner is None:
                return self.pretend(collective, parts)
            work = getattr(inner, target)(*args, **kwargs)
        except RuntimeError as error:
            registry.failed(error, collective.name, self.generation)
            return self.pretend(collective, parts)
        registry.count_waited()
        recording = registry.recording
        if recording is None or work is None:
            return work
        outputs = collective.outputs(parts)
        entry = recording.reserve(self._name, collective.name, outputs)
        return RecordedWork(work, partial(recording.fill, entry, outputs))

    def refused_peer(self, collective: Collective, parts: Parts) -> bool:
        """Whether a send or receive names a rank outside the group: Gloo would wait for it until the timeout."""
        return collective.name in {"send", "recv"} and len(parts) > 1 and not 0 <= int(parts[1]) < len(self.spec.ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        if self.inner is None:
            self.registry.note_fake()
            return
        if device.type == "cuda":
            self._ensure_cuda()
        c10d.start_coalescing(self.inner, device)

    start_coalescing = _start_coalescing

    def _end_coalescing(self, device: torch.device) -> Any:
        if self.inner is None:
            self.registry.note_fake()
        else:
            try:
                return c10d.end_coalescing(self.inner, device)
            except RuntimeError as error:
                self.registry.failed(error, COALESCED.name, self.generation)
        return FakeWork(self, COALESCED, (), attempt=ANY_ATTEMPT)  # as torch's own work, which is not checked either

    end_coalescing = _end_coalescing

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """See `torch.distributed.monitored_barrier`. It exists to report a timeout, so it raises one."""
        inner: Any = self.inner
        if inner is None:
            self.registry.note_fake()
            return
        self.registry.count_issued()
        try:
            inner.monitored_barrier(timeout, wait_all_ranks)
        except RuntimeError as error:
            self.registry.failed(error, "monitored_barrier", self.generation, may_time_out=True)
        self.registry.count_waited()

    # --- called by torch ---------------------------------------------------------------------------------------------

    def _get_backend(self, device: torch.device) -> Any:
        if self.inner is None:
            return c10d.fake_backend(self.spec.rank, len(self.spec.ranks))
        if device.type == "cuda" and self._may_see_cuda:
            self._ensure_cuda()
        return c10d.backend_of(self.inner, device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives, in this epoch and later ones."""
        self.spec = replace(self.spec, timeout=timeout)
        if self.inner is not None:
            c10d.backend_of(self.inner, torch.device("cpu")).set_timeout(timeout)

    def shutdown(self) -> None:
        """Free the group, because the script destroyed it."""
        self.destroyed = True
        self.registry.forget(self)

    abort = shutdown

    def rank(self) -> int:
        """Return this process's rank in the group."""
        return self.spec.rank

    def size(self) -> int:
        """Return the number of members."""
        return len(self.spec.ranks)

    getRank = rank  # noqa: N815 - torch's name
    getSize = size  # noqa: N815

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the group's name."""
        self._name = name

    _set_group_name = setGroupName

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the group's description."""
        return self._description

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        """Set the group's description."""
        self._description = desc

    _set_group_desc = setGroupDesc

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    def _set_sequence_number_for_group(self) -> None:
        return

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def __repr__(self) -> str:
        state = "fake" if self.inner is None else "attached"
        return f"<deadpool group {self._name!r}, rank {self.spec.rank} of {len(self.spec.ranks)}, {state}>"


def _on_cuda(parts: Parts) -> bool:
    return next((tensor.is_cuda for tensor in tensors_in(parts[:2])), False)


def _method(collective: Collective, target: str) -> Callable[..., Any]:
    """Return the method that issues the collective. Hot path: every collective of the script runs through it."""
    name, reduced = collective.name, collective.reduced
    kind = ThreadedWork if name in _UNSLICED else GuardedWork

    def issue(self: Group, *args: Any, **kwargs: Any) -> Any:
        parts = (*args, *kwargs.values()) if kwargs else args
        registry = self.registry
        if reduced is not None and registry.marks.open:
            registry.mark(name, list(tensors_in(parts[reduced])))
        inner = self.inner
        if inner is None:
            return self.pretend(collective, parts)
        registry.count_issued()
        if self._may_see_cuda and _on_cuda(parts):
            return self.issue_cuda(target, collective, args, kwargs, parts)
        try:
            work = getattr(inner, target)(*args, **kwargs)
        except RuntimeError as error:
            if self.refused_peer(collective, parts):
                raise
            registry.failed(error, name, self.generation)
            registry.count_waited()
            return self.pretend(collective, parts)
        guarded = kind(self, work, collective, parts)
        recording = registry.recording
        if recording is not None:
            guarded.record = partial(recording.fill, recording.reserve(self._name, name, collective.outputs(parts)))
        return guarded

    issue.__name__ = issue.__qualname__ = target
    return issue


def _define_collectives() -> None:
    for collective in COLLECTIVES:
        known = [name for name in collective.names if hasattr(dist.ProcessGroup, name)]  # versions of torch differ
        for name in collective.names if known else ():
            setattr(Group, name, _method(collective, name if name in known else known[0]))


_define_collectives()
