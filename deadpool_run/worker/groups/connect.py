"""Building groups for one epoch: the members meet through the store, then Gloo connects them.

The blocking part runs in a helper thread. Its caller can be freed at any moment (another member died); the helper then
ends by itself, at the latest when the time-out is over, and frees what it had opened. Members connect only after all of
them have announced themselves, so that the blocking part is short and no one connects to a peer that still severs the
connections of the last epoch.

Keys of a meeting, below its prefix: `@<rank>` announces a member, `@come` counts them, and all wait for `@go`, which
the last one sets. A member that is cancelled sets `@go` too, to another value: that ends its own wait (torch's store
offers no other way that does not fill the log), and those of the others, whose epoch is over as well.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

from deadpool_run.errors import AttachError
from deadpool_run.worker.compat import c10d
from deadpool_run.worker.groups import gloo

_MARGIN_S = 1.0
_ALL_CAME = "all"
_CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group to be built. `ranks` are the world's ranks of its members; `rank` is this process's place among them."""

    group: str
    rank: int
    ranks: tuple[int, ...]
    timeout: timedelta


@dataclass(frozen=True, slots=True)
class Inner:
    """A group's communicators of one epoch."""

    group: ProcessGroup
    nccl_store: Store
    """For an NCCL backend, which is made when the first CUDA tensor comes."""


Source = Store | Callable[[], Store]
"""A store, or what connects to it when it is first needed: a store that has moved may not answer either."""


class GroupConnections:
    """Connections to one store, for helper threads."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self._store: Store | None = source if isinstance(source, Store) else None
        self._free: list[Store] = []
        self._lock = threading.Lock()

    @property
    def store(self) -> Store:
        """The store itself, once a connection has been taken."""
        assert self._store is not None
        return self._store

    def prepare(self) -> None:
        """Connect ahead of need."""
        self.give_back(self.take())

    def take(self) -> Store:
        """Return a connection that nobody uses; connects if need be. Raises torch's `DistError`."""
        with self._lock:
            if self._free:
                return self._free.pop()
            store = self._store
        if (
            store is None
        ):  # not under the lock: the store may not answer, and a later attempt must not wait for this one
            assert not isinstance(self.source, Store)
            store = self.source()
            with self._lock:
                self._store = self._store or store
        return c10d.clone_store(store)

    def give_back(self, connection: Store) -> None:
        """Let it be used again."""
        with self._lock:
            self._free.append(connection)


@dataclass(frozen=True, slots=True)
class GroupMeeting:
    """Where and as whom this process meets its peers."""

    connections: GroupConnections
    prefix: str
    rank: int
    size: int


class Build:
    """One attempt to build groups. `wait` may be left at any moment by `cancel`."""

    def __init__(
        self, device: gloo.Device, meeting: GroupMeeting, plans: Sequence[GroupPlan], timeout: timedelta
    ) -> None:
        self._device = device
        self._meeting = meeting
        self._plans = tuple(plans)
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._timeout = timeout
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self._meets = False
        self.cancelled = False
        self._error: BaseException | None = None
        self._built: list[Inner] = []
        self.peers: tuple[gloo.Endpoint, ...] = ()
        """Where the members' devices listen, in the order of the world's ranks; empty until they have met."""

    def run(self, peers: tuple[gloo.Endpoint, ...] | None) -> list[Inner]:
        """Build every group. With `peers` known, the members have met in this epoch before.

        Raises `AttachError` if it was cancelled, took too long, or failed; the cause says how.
        """
        thread = threading.Thread(target=self._work, args=(peers,), name="deadpool-attach", daemon=True)
        thread.start()
        over = self._over.wait(self._timeout.total_seconds() + _MARGIN_S)
        with self._lock:
            if self._error is None and over and not self._abandoned:
                return self._built
            self._abandoned = True
            self._built = []
            error = self._error
        if error is None:
            seconds = self._timeout.total_seconds()
            raise AttachError(f"a member did not come within {seconds:g} s, or the store does not answer")
        raise AttachError(f"communicators could not be built: {error}") from error

    def cancel(self, reason: str) -> None:
        """Free the caller of `run` now; it raises. Idempotent. If it has its result already, `cancelled` tells it."""
        with self._lock:
            self.cancelled = True
            if self._over.is_set():
                return
            self._abandoned = True
            self._error = AttachError(reason)
            self._over.set()
            meets = self._meets
        if meets:  # in a thread: the store may not answer
            threading.Thread(target=self._end_meeting, name="deadpool-attach-cancel", daemon=True).start()
        self._device.sever(self.peers)

    def _work(self, peers: tuple[gloo.Endpoint, ...] | None) -> None:
        built: list[Inner] = []
        error: Exception | None = None
        store = None
        try:
            store = self._meeting.connections.take()
            self.peers = self._meet(store) if peers is None else peers
            for plan in self._plans:
                self._check_time()
                built.append(self._connect(store, plan))
        except Exception as caught:  # noqa: BLE001 - handed to the thread that waits
            error = caught
        if store is not None and not isinstance(error, dist.DistNetworkError):  # then it is broken
            self._meeting.connections.give_back(store)
        with self._lock:
            wanted = not self._abandoned
            if wanted:
                self._error = error
                self._built = [] if error else list(built)
            self._over.set()
        built.clear()  # what is not wanted is freed here; the error's traceback would keep it

    def _meet(self, store: Store) -> tuple[gloo.Endpoint, ...]:
        """Announce this process and wait for everyone's announcement; return where their devices listen."""
        prefix, rank, size = self._meeting.prefix, self._meeting.rank, self._meeting.size
        mine = {"endpoint": self._device.endpoint, "groups": [plan.group for plan in self._plans]}
        with self._lock:
            self._check_time()
            self._meets = True
        store.set(f"{prefix}/@{rank}", json.dumps(mine))
        if store.add(f"{prefix}/@come", 1) == size:
            store.set(f"{prefix}/@go", _ALL_CAME)
        try:
            store.wait([f"{prefix}/@go"], self._left())
        except dist.DistStoreError:
            raise AttachError(f"a member did not come within {self._timeout.total_seconds():g} s") from None
        with self._lock:
            self._meets = False
        if store.get(f"{prefix}/@go") != _ALL_CAME.encode():
            raise AttachError("a member left the meeting: a further one was lost")
        members = [json.loads(value) for value in c10d.get_all(store, [f"{prefix}/@{each}" for each in range(size)])]
        for plan in self._plans:
            missing = [other for other in plan.ranks if plan.group not in members[other]["groups"]]
            if missing:
                raise AttachError(
                    f"ranks {missing} have no group {plan.group!r}, of which they are members.\n"
                    "Create every group during set-up or in the first two steps, so that a replacement creates it too."
                )
        return tuple((str(host), int(port)) for host, port in (member["endpoint"] for member in members))

    def _end_meeting(self) -> None:
        """Have `_meet` return. Not over the connection on which it waits."""
        with contextlib.suppress(dist.DistError):  # the store is lost too: it ends with its time-out
            self._meeting.connections.store.set(f"{self._meeting.prefix}/@go", _CANCELLED)

    def _connect(self, store: Store, plan: GroupPlan) -> Inner:
        prefixed = PrefixStore(f"{self._meeting.prefix}/{plan.group}", store)
        size = len(plan.ranks)
        backend = self._device.connect(prefixed, plan.rank, size, connect_timeout=self._left(), timeout=plan.timeout)
        nccl_store = PrefixStore(f"{self._meeting.prefix}/{plan.group}/cuda", self._meeting.connections.store)
        return Inner(c10d.plain_group(prefixed, plan.rank, size, backend), nccl_store)

    def _left(self) -> timedelta:
        return timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))

    def _check_time(self) -> None:
        if self._abandoned:
            raise AttachError("abandoned")
        if time.monotonic() > self._deadline:
            raise AttachError(f"a member did not come within {self._timeout.total_seconds():g} s")
