"""The registry of this process's groups. They attach, abort and attach again together, while the script keeps using them.

States: REHEARSING (a replacement: results are fake or from the transcript) -> ATTACHED -> ABORTED (a member was lost:
results are fake, nothing blocks, nothing raises) -> ATTACHED in the next epoch.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from typing import Any

from torch.distributed.distributed_c10d import ProcessGroup, Store

from deadpool_run.errors import AttachError
from deadpool_run.vault.status_page import RankEntry
from deadpool_run.worker.device.backend import DeviceBackend, GroupSpec
from deadpool_run.worker.device.channel import Channel, ChannelsEnd, quiesce, release, shut_down
from deadpool_run.worker.device.choose import device_backend
from deadpool_run.worker.groups import connect, gloo
from deadpool_run.worker.groups.group import Group
from deadpool_run.worker.groups.host import HostMesh
from deadpool_run.worker.groups.owner import GroupOwner
from deadpool_run.worker.practice import practice
from deadpool_run.worker.process import script_threads
from deadpool_run.worker.transcript.transcript import Transcript

_FREE_S, _FREE_AT_END_S = 0.1, 1.0
"""Wait up to this long, in a repair and at the end, until old communicators are freed. Gloo's threads end at once, unless
one is stuck in a message that was cut in the middle: until Gloo's own timeout."""
_END_S = 10.0
"""At the end, wait up to this long for collectives on the device, and for the end of its communicators."""
_LOST_MEANWHILE = "another member was lost while communicators were being connected"


class GroupState(Enum):
    """Where the results of this process's collectives come from."""

    REHEARSING = "rehearsing"
    ATTACHED = "attached"
    ABORTED = "aborted"


class Registry(GroupOwner):
    """All deadpool groups of this process, in the order of their creation."""

    def __init__(
        self, *, rank_entry: RankEntry, on_failure: Callable[[str], None], timeout: timedelta | None = None
    ) -> None:
        """`on_failure` is called from any thread when a collective fails by itself, once per epoch.

        `timeout` is that of the user's collectives; None: as passed to `init_process_group`.
        """
        super().__init__(rank_entry, device_backend())
        self.state = GroupState.REHEARSING
        self.groups: list[Group] = []
        self.generation = 1
        self.on_failure = on_failure
        self._timeout = timeout
        self._lock = threading.RLock()
        self._gloo_device: gloo.Device | None = None
        self._rendezvous: connect.Rendezvous | None = None
        self._connections: connect.GroupConnections | None = None
        self._prefix = ""
        self._worlds = 0
        self._made: Counter[str] = Counter()
        """The groups of this epoch, by name: a script may destroy one and make another one of the same name."""
        self._peers: tuple[gloo.Endpoint, ...] | None = None
        self._connecting: connect.ConnectAttempt | None = None
        self._host_mesh: HostMesh | None = None
        self._host_used = self.device is None
        """Whether an attach connects Gloo for groups on the device, too."""
        self._retired: list[connect.EpochGroup] = []
        self._leaving: list[Channel] = []  # of groups that the script destroys just now
        self._aborts: list[ChannelsEnd] = []

    @contextmanager
    def answered_by(self, group: Group, transcript: Transcript) -> Iterator[None]:
        """Answer the group's collectives from the transcript; an abort that begins meanwhile stays in force."""
        with self._lock:
            before = self.state, self.playback, self.step_failed
            group.inner = None
            self.playback = transcript
        try:
            yield
        finally:
            with self._lock:
                state, self.playback, step_failed = before
                self.step_failed = step_failed or self.state is not state
                group.uncover()

    # --- abort -----------------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """End every collective now, and give later ones fake results; make a running `attach` raise, within milliseconds.

        Any thread; idempotent. A rehearsing registry has no collectives to end.
        """
        with self._lock:
            if self._connecting is not None:
                self._connecting.cancel(_LOST_MEANWHILE)
            self._abort_groups()

    def failed(  # noqa: PLR0913 - see there
        self,
        error: RuntimeError,
        what: str,
        generation: int,
        *,
        attempt: int | None = None,
        may_time_out: bool = False,
        device: DeviceBackend | None = None,
    ) -> None:
        """See `GroupOwner.failed`."""
        is_peer_failure = gloo.is_peer_failure if device is None else device.is_peer_failure
        try:
            with self._lock:
                first = self.state is GroupState.ATTACHED and generation == self.generation
                if first:
                    if not is_peer_failure(error) or (may_time_out and not gloo.is_broken(error)):
                        raise error
                    self._abort_groups()
            if first:
                self.on_failure(f"{what}: {error}")
            try:
                self.note_fake(what, attempt)
            except RuntimeError as unheard:  # no peer was lost; one has left before the last collective, say
                raise error from unheard
        finally:
            del error  # see `GuardedWork._fail`

    def _abort_groups(self) -> None:
        if self.state is not GroupState.ATTACHED:
            return
        self.state = GroupState.ABORTED
        detached = [epoch for group in self.groups if (epoch := group.detach()) is not None]
        self._end_host_mesh()
        self._retire(detached)
        if self._gloo_device is not None and self._peers is not None:
            self._gloo_device.sever(self._peers)
        self.cancellation.schedule(self.generation)

    def _end_host_mesh(self) -> None:
        if (mesh := self._host_mesh) is not None:
            self._host_used = self._host_used or mesh.is_used
            mesh.end(_LOST_MEANWHILE)

    def find_failure(self) -> bool:
        """Start an abort if the device's library has found a failure by itself: such a collective ends, and leaves garbage.

        Return whether groups on the device are aborted. Any thread.
        """
        device = self.device
        if device is None or self.state is not GroupState.ATTACHED:
            return device is not None and self.state is GroupState.ABORTED
        for group in list(self.groups):
            channel = group.channel
            if channel is not None and (found := device.failure(channel.communicator)):
                with self._lock:
                    first = group.channel is channel
                    self._abort_groups()
                    self.intact = False  # it may have been the last step's
                if first:
                    self.on_failure(f"{device.name} reports {found} of the group {group.group_name!r}")
                return True
        return False

    def has_ended(self) -> bool:
        """Wait until the device has ended all steps; return whether it has done so without a failure."""
        self.run_ahead.end_step(now=True)
        return not self.find_failure()

    def _retire(self, epochs: list[connect.EpochGroup]) -> None:
        """Abort communicators on the device. All are freed later: a callback on one of Gloo's threads must not do that."""
        self._retired += epochs
        channels = [epoch.channel for epoch in epochs if epoch.channel is not None] + self._leaving
        if self.device is not None and channels:
            self.spoil_step()  # before the abort: it is unknown which of the step's collectives that cuts
            self.intact = self.run_ahead.ended
            self._aborts.append(quiesce(self.device, channels))

    def _free_retired(self, timeout_s: float, free_s: float) -> str:
        """Abort, and free the communicators of all past epochs; return what could not be ended on the device in time."""
        with self._lock:
            self._abort_groups()
        for group in self.groups:  # before the wait for an abort, which waits for them
            group.close_coalescing()
        if unended := self._wait_aborted(time.monotonic() + timeout_s):
            return unended
        with self._lock:
            retired, self._retired = self._retired, []
        self.wait_threads.free(retired, free_s)
        return ""

    def _wait_aborted(self, deadline: float) -> str:
        """Wait until all communicators on the device are aborted, and free them then; return what failed or is late."""
        aborts = list(self._aborts)
        for abort in aborts:
            if unended := abort.wait(deadline):
                return unended
        channels = [channel for abort in aborts for channel in abort.channels]
        del self._aborts[: len(aborts)]
        return release(self.device, channels).wait(deadline) if self.device is not None else ""

    # --- attaching -------------------------------------------------------------------------------------------------

    def attach(
        self,
        store: connect.Source,
        prefix: str,
        timeout: timedelta,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect every group with its peers, under store keys that begin with `prefix`, and end the abort.

        `store` is the same object as the last time, unless the store has moved. `cancelled` is read once, when `abort` can
        already interrupt this, so that no loss is missed. On `AttachError` the groups stay fake.
        """
        began, groups = time.monotonic(), list(self.groups)
        if unended := self._free_retired(timeout.total_seconds(), _FREE_S):
            raise AttachError(f"communicators of the last epoch are not free: {unended}")
        rendezvous, timeout = self._open(store, prefix), timeout - timedelta(seconds=time.monotonic() - began)
        specs = [replace(group.spec, earlier=0) for group in groups]  # a replacement has made only these
        with self._attempt(rendezvous, specs, timeout, host=self._host_used) as attempt:
            if cancelled():
                raise AttachError(_LOST_MEANWHILE)
            inners = attempt.run(None)
            with self._lock:
                if attempt.cancelled:  # after `run` had its result
                    raise AttachError(_LOST_MEANWHILE)
                script_threads.note_older()
                self.generation += 1
                for group, inner in zip(groups, inners, strict=True):
                    group.attach(inner, self.generation)
                self._met(attempt)
                for spec, inner in zip(specs, inners, strict=True):
                    self._add_host(spec, inner)
                self._made = Counter(spec.group for spec in specs)
                self._reset_counts()
                self.state = GroupState.ATTACHED
                self.step_failed = False
                self.intact = True

    @contextmanager
    def _attempt(
        self, rendezvous: connect.Rendezvous, specs: list[GroupSpec], timeout: timedelta, *, host: bool
    ) -> Iterator[connect.ConnectAttempt]:
        """Yield an attempt to connect groups, which `abort` cancels. `host`: see `ConnectAttempt`."""
        self._gloo_device = self._gloo_device or gloo.Device()
        attempt = connect.ConnectAttempt(
            self._gloo_device, self.device, rendezvous, specs, timeout, on_abort=self._aborts.append, host=host
        )
        with self._lock:
            self._connecting = attempt
        try:
            yield attempt
        except AttachError:
            attempt.abandon()  # if it was cancelled when it had connected all
            raise
        finally:
            with self._lock:
                self._connecting = None

    def _met(self, attempt: connect.ConnectAttempt) -> None:
        """Use what the rendezvous of an epoch has told."""
        self._peers, self._host_used = attempt.peers, attempt.host
        if self.device is not None:
            assert self._gloo_device is not None
            assert self._rendezvous is not None
            self._end_host_mesh()  # of a world that the script has destroyed
            self._host_mesh = HostMesh(self._gloo_device, self._rendezvous, attempt.peers, wanted=self._host_used)

    def _add_host(self, spec: GroupSpec, inner: connect.EpochGroup) -> None:
        if inner.host is None and self._host_mesh is not None:
            self._host_mesh.add(spec, inner)

    def connect_host(self, group: Group, epoch: connect.EpochGroup) -> ProcessGroup | None:
        """See `GroupOwner.connect_host`."""
        assert epoch.need_host is not None
        try:
            return epoch.need_host(epoch)
        except AttachError as error:
            self._lost(f"group {group.group_name!r}: {error}", lambda: group.holds(epoch))
            return None

    def shut_down(self) -> None:
        """Free every communicator, at the end of the process or the job; later results are fake.

        On the device, collectives that run are brought to their end: a peer may need our part of them.
        """
        script_threads.note_older()
        practice.end_interrupted()
        if self.device is not None and self.state is GroupState.ATTACHED and not self.step_failed:
            self._end_in_order(self.device)
        self._free_retired(_END_S, _FREE_AT_END_S)
        if self._host_mesh is not None:
            self._host_mesh.join(_FREE_AT_END_S)
        self.groups.clear()
        self._gloo_device = self._connections = None

    def _end_in_order(self, device: DeviceBackend) -> None:
        channels = [channel for group in self.groups if (channel := group.channel) is not None]
        if channels and device.mark().wait(_END_S):
            shut_down(device, channels).wait(time.monotonic() + _END_S)  # what is late is aborted

    # --- groups ----------------------------------------------------------------------------------------------------

    def create(self, options: Any, library_options: Any = None) -> Group:
        """Create a group; `options` are torch's `_DistributedBackendOptions`, the others those of the device's library."""
        world = not options.global_ranks_in_group
        spec = connect.spec_of(options, library_options, self._timeout, earlier=self._made[options.group_id])
        self._made[spec.group] += 1
        group = Group(self, spec)
        if world:
            assert self._connections is not None
            # A script may destroy its world and make another one: their keys must differ.
            prefix = f"{self._prefix}/w{self._worlds}" if self._worlds else self._prefix
            self._worlds += 1
            self._rendezvous = connect.Rendezvous(self._connections, prefix, options.group_rank, options.group_size)
        inner = self._connect_one(spec, world=world) if self.state is GroupState.ATTACHED else None
        if self.state is not GroupState.REHEARSING and self.attempt and not self.in_rehearsed_steps:
            self.late_groups.append(spec.group)
        with self._lock:
            self.groups.append(group)
            if inner is not None and self.state is GroupState.ATTACHED:
                self._add_host(spec, inner)
                group.attach(inner, self.generation)
            elif inner is not None:  # an abort began meanwhile
                self._retire([inner])
        return group

    def _connect_one(self, spec: GroupSpec, *, world: bool) -> connect.EpochGroup | None:
        """Connect a new group in the current epoch; None if a peer was lost, which starts an abort.

        Raises `AttachError` for the world's own group: without it no step can go on.
        """
        assert self._rendezvous is not None
        host = self._host_used if world else self.device is None  # members of a new group may differ in what they know
        try:
            with self._attempt(self._rendezvous, [spec], spec.timeout, host=host) as attempt:
                (inner,) = attempt.run(None if world else self._peers)
        except AttachError as error:
            if world:
                raise
            self._lost(f"new_group: {error}")
            return None
        if world:
            with self._lock:
                self._met(attempt)
        return inner

    def _lost(self, why: str, is_of_this_epoch: Callable[[], bool] = lambda: True) -> None:
        """Start an abort, because communicators could not be connected."""
        with self._lock:
            first = self.state is GroupState.ATTACHED and is_of_this_epoch()
            if first:
                self._abort_groups()
        if first:
            self.on_failure(why)
        self.note_fake(why)

    def forget(self, group: Group) -> None:
        """Free a group that the script destroyed."""
        with self._lock:
            self.late_groups = [each for each in self.late_groups if each != group.spec.group]
            if group in self.groups:
                self.groups.remove(group)
            inner = group.detach()
            inners, channel = [inner], None if inner is None else inner.channel
            if inner is not None and self._host_mesh is not None:
                self._host_mesh.remove(inner)
            if channel is not None:
                self._leaving.append(channel)  # until it has ended, it can still be aborted
        if channel is not None:
            assert self.device is not None
            shut_down(self.device, [channel]).wait(time.monotonic() + group.spec.timeout.total_seconds())
            with self._lock:
                self._leaving.remove(channel)
        self.wait_threads.free(inners, _FREE_AT_END_S)

    def place(self, store: Store, prefix: str, *, attached: bool) -> None:
        """Set where groups created from now on meet, and whether they connect."""
        self._connections = connect.GroupConnections(store)
        self._connections.give_back(self._connections.take())  # connect now
        self._prefix = prefix
        self.state = GroupState.ATTACHED if attached else GroupState.REHEARSING

    def _open(self, store: connect.Source, prefix: str) -> connect.Rendezvous:
        if self._rendezvous is None:
            raise AttachError("there is no group to attach.\nCall deadpool_run.init() first.")
        if self._connections is None or self._connections.source is not store:
            self._connections = connect.GroupConnections(store)
        self._prefix, self._worlds = prefix, 1
        self._rendezvous = replace(self._rendezvous, connections=self._connections, prefix=prefix)
        return self._rendezvous
