"""A process group that outlives its communicators: connected while all members live, fake otherwise."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deadpool_run.errors import PeerLostError, ScriptError
from deadpool_run.worker.codec import tensors_in
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.compat.group_api import GroupApi
from deadpool_run.worker.compat.writes import note_collective
from deadpool_run.worker.device.backend import DeviceBackend, GroupSpec
from deadpool_run.worker.device.channel import Channel, StartedCoalescing, ThreadCoalescing
from deadpool_run.worker.groups.collectives import COALESCED, COLLECTIVES, Collective, Parts, answer, place_of
from deadpool_run.worker.groups.connect import EpochGroup
from deadpool_run.worker.groups.owner import NO_ATTEMPT, GroupOwner
from deadpool_run.worker.groups.works import DeviceWork, FakeWork, GuardedWork, ThreadedWork
from deadpool_run.worker.process import script_threads

_UNSLICED = frozenset(
    {
        *("send", "recv", "recv_anysource"),
        *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    }
)


class Group(GroupApi):
    """A deadpool group. `inner`, its communicators, is None while its collectives are fake.

    torch's C++ code calls the collectives of a Python group by name, and reads its name, rank and size.
    """

    def __init__(self, registry: GroupOwner, spec: GroupSpec) -> None:
        super().__init__(spec.rank, len(spec.ranks))  # type: ignore[call-arg] # the stub lacks this constructor
        self.registry = registry
        self.spec = spec
        self.inner: EpochGroup | None = None
        self.generation = 0
        """The registry's generation of communicators; a work belongs to the one on which it was issued."""
        self.destroyed = False
        self._epoch: EpochGroup | None = None
        self._device: DeviceBackend | None = registry.device if spec.on_device else None
        self._coalescing = ThreadCoalescing()
        self._name = spec.group
        self._description = "undefined"

    # --- attaching -------------------------------------------------------------------------------------------------

    def attach(self, inner: EpochGroup, generation: int) -> None:
        """Use these communicators from now on."""
        self.generation = generation
        self._epoch = self.inner = inner

    def detach(self) -> EpochGroup | None:
        """Give fake results from now on; return the communicators, which the caller must end and free."""
        epoch, self.inner, self._epoch = self._epoch, None, None
        return epoch

    @property
    def channel(self) -> Channel | None:
        """The communicator on the device, while there is one."""
        epoch = self._epoch
        return None if epoch is None else epoch.channel

    def holds(self, epoch: EpochGroup) -> bool:
        """Return whether these are the group's communicators now."""
        return self._epoch is epoch

    def uncover(self) -> None:
        """Use the communicators again after a time without `inner`, unless they were detached meanwhile."""
        self.inner = self._epoch

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
        self.registry.note_fake(collective.name)
        self.answer(collective, parts)
        source = self.other_rank
        if (transcript := self.registry.playback) is not None:
            entry = transcript.play(self._name, collective.name, collective.outputs(parts))
            if entry is not None and entry.source is not None:
                source = entry.source
        return FakeWork(self, collective, parts, source)

    def issue_on_device(
        self, target: str, collective: Collective, args: Parts, kwargs: dict[str, Any], parts: Parts
    ) -> Any:
        """Issue on the device. The work, if there is one, counts as waited for at once: the host never waits for it."""
        registry, name = self.registry, collective.name
        assert self._device is not None
        self._device.check_issue(name)
        recording = registry.recording
        outputs = collective.outputs(parts) if recording is not None else []
        # Before it is issued, whatever comes of it: playback counts calls.
        entry = None if recording is None else recording.reserve(self._name, name, outputs)
        channel, started = self._enter()
        if channel is None:
            return self.pretend(collective, parts)
        waits = name == "barrier" and started is None and not parts[0].asyncOp
        if waits:  # outside the channel: an abort, which ends the wait, begins when no thread is inside
            args, kwargs = (c10d.asynchronous(parts[0]),), {}
        try:
            work = getattr(channel.target, target)(*args, **kwargs)
        except RuntimeError as error:
            registry.failed(error, name, self.generation, device=self._device)
            return self.pretend(collective, parts)
        finally:
            if started is None:
                channel.leave()
        registry.count_waited()
        fill = None if recording is None or entry is None else partial(recording.fill, entry, outputs)
        if script_threads.is_scripts():
            fill = partial(self._confirm, name, channel, fill)
        if started is not None and fill is not None:  # not issued yet: the end of the coalescing does that
            started.fills.append(fill)
            fill = None
        if work is not None:
            guarded = DeviceWork(self, channel, work, name, fill)
            return self._wait_on_host(guarded) if waits else guarded
        if fill is not None:  # complete for the current stream, on which `fill` copies
            fill()
        return None

    def _wait_on_host(self, barrier: DeviceWork) -> None:
        barrier.wait()
        assert self._device is not None
        self._device.mark().wait()

    def _confirm(self, what: str, channel: Channel, then: Callable[[], None] | None) -> None:
        """Wait until the device has ended a collective of a thread of the script: no step discards what an abort leaves."""
        assert self._device is not None
        self._device.mark().wait()
        if self.registry.find_failure() or self.channel is not channel:
            self.registry.note_fake(what, NO_ATTEMPT)  # also if another thread waits
        if then is not None:
            then()

    def _enter(self) -> tuple[Channel | None, StartedCoalescing | None]:
        """Enter the device's communicator, or be inside that of this thread's coalescing; None while results are fake.

        A coalescing goes on with the communicator on which it began: leaving it half-way would keep all later calls of the
        thread from being launched.
        """
        if (started := self._coalescing.started) is not None:
            return started.channel, started
        channel = self.channel if self.inner is not None else None
        if channel is None or not channel.enter():
            return None, None
        return channel, None

    def refused_peer(self, collective: Collective, parts: Parts) -> bool:
        """Whether a send or receive names a rank outside the group: Gloo would wait for it until the timeout."""
        return collective.name in {"send", "recv"} and len(parts) > 1 and not 0 <= int(parts[1]) < len(self.spec.ranks)

    def _start_coalescing(self, device: torch.device) -> None:
        coalescing, target = self._coalescing, None
        try:
            self.registry.admit(COALESCED.name)
            if not self.runs_on(device):
                coalescing.inner = target = self._host()
            elif (channel := self._enter()[0]) is not None:
                coalescing.started, target = StartedCoalescing(channel), channel.target
            if target is None:
                self.registry.note_fake(COALESCED.name)
            else:
                c10d.start_coalescing(target, device)
        except PeerLostError:
            c10d.forget_coalescing(self)
            raise

    start_coalescing = _start_coalescing

    def _end_coalescing(self, device: torch.device) -> Any:
        """End what this thread has started, on the communicator on which it did, even if an abort began meanwhile."""
        coalescing = self._coalescing
        started, inner = coalescing.started, coalescing.inner
        coalescing.started = coalescing.inner = None
        try:
            if started is not None:
                return self._end_on_device(started, device)
            if inner is not None:
                return c10d.end_coalescing(inner, device)
            self.registry.note_fake(COALESCED.name)
        except RuntimeError as error:
            self.registry.failed(
                error, COALESCED.name, self.generation, device=None if started is None else self._device
            )
        return FakeWork(self, COALESCED, (), attempt=NO_ATTEMPT)  # as torch's own work, which is not checked either

    def close_coalescing(self) -> None:
        """End a coalescing that an exception has left open in this thread: it would collect all later calls."""
        started = self._coalescing.started
        if started is not None and self._device is not None:
            self._coalescing.started = None
            c10d.forget_coalescing(self)
            with suppress(RuntimeError):
                self._end_on_device(started, self._device.place())

    def _end_on_device(self, started: StartedCoalescing, device: torch.device) -> Any:
        try:
            work = c10d.end_coalescing(started.channel.target, device)
        finally:
            started.channel.leave()
        if work is not None:
            return DeviceWork(self, started.channel, work, COALESCED.name, started.fill)
        started.fill()
        return None

    end_coalescing = _end_coalescing

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """See `torch.distributed.monitored_barrier`. It exists to report a timeout, so it raises one."""
        self.registry.admit("monitored_barrier")
        host: Any = self._host()
        if host is None:
            self.registry.note_fake("monitored_barrier")
            return
        self.registry.count_issued()
        try:
            host.monitored_barrier(timeout, wait_all_ranks)
        except RuntimeError as error:
            self.registry.failed(error, "monitored_barrier", self.generation, may_time_out=True)
        self.registry.count_waited()

    def _host(self) -> dist.ProcessGroup | None:
        """Return torch's own group for CPU tensors; None while results are fake."""
        inner = self.inner
        if inner is None or inner.host is not None:
            return None if inner is None else inner.host
        return self.registry.connect_host(self, inner)

    def has_device(self) -> bool:
        """See `GroupApi.has_device`."""
        return self.spec.on_device

    def runs_on(self, device: torch.device) -> bool:
        """See `GroupApi.runs_on`."""
        return self._device is not None and self._device.handles(device)

    def own_device(self) -> torch.device:
        """See `GroupApi.own_device`."""
        return torch.device("cpu") if self._device is None else self._device.place()

    def results_hold(self) -> bool:
        """See `GroupApi.results_hold`."""
        registry = self.registry
        return self._device is None or registry.playback is not None or not registry.step_failed

    def carriers(self) -> list[Any]:
        """See `GroupApi.carriers`."""
        epoch = self.inner
        if epoch is None:
            return []
        targets = [epoch.host, None if epoch.channel is None else epoch.channel.target]
        return [each for each in targets if isinstance(each, dist.ProcessGroup)]

    # --- called by torch ---------------------------------------------------------------------------------------------

    def _get_backend(self, device: torch.device) -> Any:
        if self.inner is None:
            return c10d.fake_backend(self.spec.rank, len(self.spec.ranks))
        if self.runs_on(device) and (channel := self.channel) is not None:
            return channel.communicator
        host = self._host()
        return c10d.fake_backend(self.spec.rank, self.size()) if host is None else c10d.backend_of(host, device)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives, in this epoch and later ones."""
        self.spec = replace(self.spec, timeout=timeout)
        if self.inner is not None and self.inner.host is not None:
            c10d.backend_of(self.inner.host, torch.device("cpu")).set_timeout(timeout)

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


def _method(collective: Collective, target: str) -> Callable[..., Any]:
    """Return the method that issues the collective. Hot path: every collective of the script runs through it."""
    name, reduced = collective.name, collective.reduced
    kind = ThreadedWork if name in _UNSLICED else GuardedWork

    def issue(self: Group, *args: Any, **kwargs: Any) -> Any:
        parts = (*args, *kwargs.values()) if kwargs else args
        registry = self.registry
        registry.admit(name)
        note_collective(collective.outputs(parts))
        if reduced is not None and registry.marks.open:
            registry.mark(name, list(tensors_in(parts[reduced])))
        inner = self.inner
        if inner is None:
            return self.pretend(collective, parts)
        registry.count_issued()
        device = self._device
        if device is not None and (place := place_of(collective, parts)) is not None and device.handles(place):
            return self.issue_on_device(target, collective, args, kwargs, parts)
        host = inner.host
        if host is None and (host := registry.connect_host(self, inner)) is None:
            registry.count_waited()
            return self.pretend(collective, parts)
        try:
            work = getattr(host, target)(*args, **kwargs)
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
