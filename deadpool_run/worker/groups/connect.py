"""Connects the groups of one epoch: a rendezvous of all members through the store, then Gloo's and the device's connections.

In a job on a device, Gloo's connections of a group are left out until a member has needed them (`host.py`).

The blocking part runs in a helper thread. If another member dies, the caller is freed at once. The helper ends at the
latest at the timeout, and frees what it has opened. Members connect only after all of them have announced themselves. So
the blocking part is short, and no member connects to a peer that still severs the last epoch's connections.

A group that a script creates on a device later has a rendezvous of its members. So what a library allows for connecting is not
spent on members that are late at `new_group`.

Store keys of a rendezvous, below its prefix: `@<rank>` announces a member, `@come` counts the members, and all wait for
`@go`. The last one sets it to the list of all that was announced, so that each member reads one key and not one of every
other member. The handles by which members of a communicator find each other are in the announcements, too. A cancelled member sets `@go` to another value. That ends its own wait, and the waits of the others, whose epoch
is over too. Any other way to end a wait in torch's store fills the log.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

from deadpool_run.core.settings import more_to_attach_s
from deadpool_run.errors import AttachError, MissingGroupError, ProtocolError
from deadpool_run.ids import Rank
from deadpool_run.structs import Untagged
from deadpool_run.text import shortened
from deadpool_run.wire import typed
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.compat.group_api import HOST_ONLY
from deadpool_run.worker.device.backend import DeviceBackend, GroupSpec
from deadpool_run.worker.device.channel import Channel, ChannelsEnd, quiesce
from deadpool_run.worker.groups import gloo, reach

_ATTACH_S, _GROUP_S, _GROUPS_S = 30.0, 0.5, 10.0
_PROBE_S = 1.0
"""How long a failed attempt looks for the peers that cannot be connected to."""
_MOST_NAMED = 64
"""The most ranks that are reported as not reached: every rank of a large world may report as many."""
_MARGIN_S = 1.0
_CANCELLED = "cancelled"


def attach_timeout(world_size: int, groups: int = 0) -> timedelta:
    """Return the limit of one attach. A small job takes milliseconds: all members are ready when it starts.

    It ends only what no loss has cancelled. The coordinator, too, allows more for a large world.
    """
    return timedelta(seconds=_ATTACH_S + more_to_attach_s(world_size) + min(_GROUP_S * groups, _GROUPS_S))


class _Member(Untagged):
    """A member's announcement in the store. Any program that reaches the store's port may have written it."""

    endpoint: tuple[str, int]
    groups: list[str]
    host: bool = True
    """Whether it has needed Gloo for a group on the device."""
    handles: tuple[str, ...] = ()
    """Of its communicators on the device, by group; empty for a group without one, or without a device."""


@dataclass(slots=True, eq=False)
class EpochGroup:
    """A group's communicators in one epoch."""

    host: ProcessGroup | None = None
    """Torch's own group, which carries CPU tensors over Gloo; None until a member needs it."""
    channel: Channel | None = None
    """Its communicator on the device, if there is one."""
    need_host: "Callable[[EpochGroup], ProcessGroup] | None" = None
    """Connects `host`, and returns it. Raises `AttachError`."""


Source = Store | Callable[[], Store]
"""A store, or a function that connects to one when it is first needed: a store that has moved may not answer."""


class GroupConnections:
    """Connections to one store, for helper threads."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._store: Store | None = source if isinstance(source, Store) else None
        self._free: list[Store] = []
        self._lock = threading.Lock()

    @property
    def store(self) -> Store:
        """The store, after a connection has been taken."""
        assert self._store is not None
        return self._store

    def take(self) -> Store:
        """Return an idle connection, or a new one. Raises torch's `DistError`."""
        with self._lock:
            if self._free:
                return self._free.pop()
            store = self._store
        if store is None:  # without the lock: the store may not answer, and a later attempt must not wait for this one
            assert not isinstance(self.source, Store)
            store = self.source()
            with self._lock:
                self._store = self._store or store
        return c10d.clone_store(store)

    def give_back(self, connection: Store) -> None:
        """Make the connection available again."""
        with self._lock:
            self._free.append(connection)


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The store, the key prefix and the rank with which this process meets its peers."""

    connections: GroupConnections
    prefix: str
    rank: int
    size: int


def spec_of(options: Any, library_options: Any, timeout: timedelta | None, *, earlier: int) -> GroupSpec:
    """Return the group of torch's `_DistributedBackendOptions` and of those of the device's library. `timeout` replaces the script's."""
    on_device = library_options is not HOST_ONLY
    return GroupSpec(
        options.group_id,
        options.group_rank,
        tuple(options.global_ranks_in_group) or tuple(range(options.group_size)),
        timeout or options.timeout,
        on_device=on_device,
        options=library_options if on_device else None,
        earlier=earlier,
    )


class ConnectAttempt:
    """One attempt to connect groups. `cancel` frees the caller of `run` at any moment."""

    def __init__(  # noqa: PLR0913 - two libraries, who and when
        self,
        gloo_device: gloo.Device,
        device: DeviceBackend | None,
        rendezvous: Rendezvous,
        specs: Sequence[GroupSpec],
        timeout: timedelta,
        *,
        on_abort: Callable[[ChannelsEnd], None],
        host: bool = True,
    ) -> None:
        """`on_abort` gets the aborts of communicators on the device that will not be used.

        Without `host`, Gloo is left out of groups on the device, unless another member of the rendezvous wants it.
        """
        self.host = host
        """Whether groups on the device get Gloo's connections, too."""
        self._gloo_device = gloo_device
        self._device = device
        self._place = None if device is None else device.place()  # of the caller's thread
        self._channels: list[Channel] = []
        self._meets_at = rendezvous.prefix
        self._on_abort = on_abort
        self._rendezvous = rendezvous
        self._specs = tuple(specs)
        self._timeout_s = timeout.total_seconds()
        self._deadline = time.monotonic() + self._timeout_s
        self._late = f"a member did not connect within {self._timeout_s:.3g} s"
        self._lock = threading.Lock()
        self._outcome: Future[list[EpochGroup]] = Future()
        self._is_waiting = False
        self.cancelled = False
        self.peers: tuple[gloo.Endpoint, ...] = ()
        """The addresses of all members' devices by world rank; empty before the rendezvous."""

    def run(self, peers: tuple[gloo.Endpoint, ...] | None) -> list[EpochGroup]:
        """Connect every group. With `peers` known, there was a rendezvous in this epoch before.

        Raises `AttachError` if it was cancelled, took too long, or failed; the cause says why. Raises `MissingGroupError`.
        """
        threading.Thread(target=self._work, args=(peers,), name="deadpool-attach", daemon=True).start()
        wait([self._outcome], self._timeout_s + _MARGIN_S)
        with self._lock:
            late = self._outcome.cancel()
        error = AttachError(f"{self._late}, or the store does not answer") if late else self._outcome.exception()
        if isinstance(error, MissingGroupError):
            raise error
        if error is not None:
            unreached = self._unreached(error)
            names = shortened([str(rank) for rank in unreached])
            why = f"{error}; not reached: rank {names}" if names else str(error)
            raise AttachError(f"communicators could not be connected: {why}", unreached[:_MOST_NAMED]) from error
        return self._outcome.result()

    def _unreached(self, error: BaseException) -> Sequence[Rank]:
        """Return which members did not come to the rendezvous, or cannot be connected to, as far as that is known."""
        known = error.unreached if isinstance(error, AttachError) else ()
        if known or not self.peers or self.cancelled:
            return known
        wanted = {rank for spec in self._specs for rank in spec.ranks} - {self._rendezvous.rank}
        endpoints = {Rank(rank): self.peers[rank] for rank in wanted}
        return reach.unreachable(endpoints, _PROBE_S, lambda: self.cancelled)

    def cancel(self, reason: str) -> None:
        """Have `run` raise now. Idempotent. If `run` has its result already, `cancelled` says so."""
        with self._lock:
            self.cancelled = True
            if self._outcome.done():
                return
            self._outcome.set_exception(AttachError(reason))
            is_waiting = self._is_waiting
        if is_waiting:  # in a thread: the store may not answer
            threading.Thread(target=self._end_rendezvous, name="deadpool-attach-cancel", daemon=True).start()
        self._gloo_device.sever(self.peers)
        self.abandon()

    def abandon(self) -> None:
        """Abort what has been connected on the device, or is being connected, on threads of their own."""
        with self._lock:
            channels, self._channels = self._channels, []
        if self._device is not None and channels:
            self._on_abort(quiesce(self._device, channels))

    def _work(self, peers: tuple[gloo.Endpoint, ...] | None) -> None:
        connected: list[EpochGroup] = []
        channels: list[Channel | None] = [None] * len(self._specs)
        members: dict[int, _Member] = {}
        error: Exception | None = None
        store = None
        try:
            store = self._rendezvous.connections.take()
            own = store if self._device is None else c10d.clone_store(store)
            if self._device is not None:
                channels = self._create(self._device, own)
            members = self._meet_world(store, channels) if peers is None else self._meet_group(store, channels, peers)
            for spec in self._specs:
                self._check_time()
                connected.append(self._connect(store, spec))
            if self._device is not None:
                connected = self._connect_device(self._device, own, channels, members, connected)
        except Exception as caught:  # noqa: BLE001 - handed to the thread that waits
            error = caught
        if store is not None and not isinstance(error, dist.DistNetworkError):  # then the connection is broken
            self._rendezvous.connections.give_back(store)
        with self._lock:
            if not self._outcome.done():
                if error is None:
                    self._outcome.set_result(list(connected))
                else:
                    self._outcome.set_exception(error)
        if error is not None:
            self.abandon()
        connected.clear()
        channels.clear()  # frees what is not wanted: the error's traceback would keep it

    def _meet_world(self, store: Store, channels: Sequence[Channel | None]) -> dict[int, _Member]:
        members = self._meet(store, channels, self._rendezvous.rank, range(self._rendezvous.size))
        self.host = any(member.host for member in members.values())
        self.peers = tuple(member.endpoint for member in members.values())
        return members

    def _meet_group(
        self, store: Store, channels: Sequence[Channel | None], peers: tuple[gloo.Endpoint, ...]
    ) -> dict[int, _Member]:
        """Meet the members of a new group on the device, in an epoch in which the world has met."""
        self.peers = peers
        if not any(channels):
            return {}
        (spec,) = self._specs
        self._meets_at = f"{self._meets_at}/{spec.key}"
        return self._meet(store, channels, spec.rank, spec.ranks)

    def _meet(
        self, store: Store, channels: Sequence[Channel | None], rank: int, ranks: Sequence[int]
    ) -> dict[int, _Member]:
        """Announce this process, the member `rank` of `ranks`, and wait for all members; return their announcements by world rank."""
        prefix, size = self._meets_at, len(ranks)
        device = self._device
        handles = (
            () if device is None else ("" if each is None else device.handle(each.communicator) for each in channels)
        )
        mine = _Member(self._gloo_device.endpoint, [spec.group for spec in self._specs], self.host, tuple(handles))
        with self._lock:
            self._check_time()
            self._is_waiting = True
        store.set(f"{prefix}/@{rank}", typed.to_json(mine).decode())
        if store.add(f"{prefix}/@come", 1) == size:
            every = c10d.get_all(store, [f"{prefix}/@{each}" for each in range(size)])
            store.set(f"{prefix}/@go", f"[{','.join(value.decode(errors='replace') for value in every)}]")
        try:
            store.wait([f"{prefix}/@go"], self._left())
        except dist.DistStoreError:
            late = reach.absent(store, [f"{prefix}/@{each}" for each in range(size)])
            raise AttachError(self._late, [Rank(ranks[each]) for each in late]) from None
        with self._lock:
            self._is_waiting = False
        told = store.get(f"{prefix}/@go")
        if told == _CANCELLED.encode():
            raise AttachError("a member left the rendezvous, because another one was lost")
        try:
            found = typed.from_plain(list[_Member], typed.parse(told))
        except ProtocolError as error:
            raise AttachError(f"a member's entry in the store is none: {error}") from error
        if len(found) != size:
            raise AttachError(f"the store has {len(found)} entries of {size} members")
        members = dict(zip(ranks, found, strict=True))
        for spec in self._specs:
            missing = [other for other in spec.ranks if spec.group not in members[other].groups]
            if missing:
                raise MissingGroupError(
                    f"ranks {missing} are members of the group {spec.group!r}, but have not created it.\n"
                    "Create every group during set-up or in the first two steps, so that a replacement creates it too."
                )
        return members

    def _end_rendezvous(self) -> None:
        """End the wait in `_meet`. Not over the connection on which it waits."""
        with contextlib.suppress(dist.DistError):  # the store is lost too: the wait ends at its timeout
            self._rendezvous.connections.store.set(f"{self._meets_at}/@go", _CANCELLED)

    def _connect(self, store: Store, spec: GroupSpec) -> EpochGroup:
        if spec.on_device and not self.host:
            return EpochGroup()
        prefixed = PrefixStore(f"{self._rendezvous.prefix}/{spec.key}", store)
        size = len(spec.ranks)
        backend = self._gloo_device.connect(
            prefixed, spec.rank, size, connect_timeout=self._left(), timeout=spec.timeout
        )
        return EpochGroup(c10d.plain_group(prefixed, spec.rank, size, backend))

    def _create(self, device: DeviceBackend, store: Store) -> list[Channel | None]:
        """Create the groups' communicators on the device, so that the rendezvous can tell their handles."""
        assert self._place is not None
        channels: list[Channel | None] = []
        for spec in self._specs:
            if not spec.on_device:
                channels.append(None)
                continue
            prefixed = self._of_device(store, spec)
            communicator = device.create(prefixed, spec, self._place)
            bare = c10d.bare_group(prefixed, spec.rank, len(spec.ranks))
            channel = Channel(communicator, device.bind(bare, communicator))
            with self._lock:
                self._channels.append(channel)
            channels.append(channel)
            self._check_time()
        return channels

    def _connect_device(
        self,
        device: DeviceBackend,
        store: Store,
        channels: list[Channel | None],
        members: dict[int, _Member],
        groups: list[EpochGroup],
    ) -> list[EpochGroup]:
        """Connect the groups' communicators on the device. Not over a connection to the store that others use.

        A step could not be freed from that: nothing cancels it there, and a peer may be lost before it has begun.
        """
        assert self._place is not None
        connected = []
        for spec, channel, group in zip(self._specs, channels, groups, strict=True):
            if channel is None:
                connected.append(group)
                continue
            of_group = (members[rank] for rank in spec.ranks)
            handles = [dict(zip(each.groups, each.handles, strict=False)).get(spec.group, "") for each in of_group]
            self._check_time()
            store.set_timeout(self._left())  # libraries wait for their peers' keys
            device.connect(channel.communicator, self._of_device(store, spec), spec, self._place, handles, self._left())
            connected.append(EpochGroup(group.host, channel))
        store.set_timeout(c10d.STORE_TIMEOUT)
        return connected

    def _of_device(self, store: Store, spec: GroupSpec) -> Store:
        return PrefixStore(f"{self._rendezvous.prefix}/{spec.key}/device", store)

    def _left(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))

    def _check_time(self) -> None:
        if self._outcome.done():
            raise AttachError("the attempt was abandoned")
        if time.monotonic() > self._deadline:
            raise AttachError(self._late)
