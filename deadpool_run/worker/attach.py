"""Building groups for one epoch: the members meet through the store, then Gloo connects them.

The blocking part runs in a helper thread. Its caller can be freed at any moment (another member died); the helper then
ends by itself, at the latest when the time-out is over, and frees what it had opened. Members connect only after all of
them have announced themselves, so that the blocking part is short and no one connects to a peer that still severs the
connections of the last epoch.
"""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store

from deadpool_run.errors import AttachError
from deadpool_run.worker import compat, gloo

_FIRST_PAUSE_S = 0.001
_LAST_PAUSE_S = 0.02
_MARGIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
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


class Connections:
    """Connections to one store for helper threads, made ahead of need.

    Each new connection of a TCPStore asks for the name of its other end, at both ends; where names are not served that
    takes seconds, and blocks the whole store meanwhile. So none is made while a repair waits for it, if possible.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._free = [compat.clone_store(store)]
        self._lock = threading.Lock()

    def take(self) -> Store:
        """Return a connection that nobody uses."""
        with self._lock:
            if self._free:
                return self._free.pop()
        return compat.clone_store(self.store)

    def give_back(self, connection: Store) -> None:
        """Let it be used again."""
        with self._lock:
            self._free.append(connection)


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where and as whom this process meets its peers."""

    connections: Connections
    prefix: str
    rank: int
    size: int


class Build:
    """One attempt to build groups. `wait` may be left at any moment by `cancel`."""

    def __init__(self, device: gloo.Device, meeting: Meeting, plans: Sequence[Plan], timeout: timedelta) -> None:
        self._device = device
        self._meeting = meeting
        self._plans = tuple(plans)
        self._deadline = time.monotonic() + timeout.total_seconds()
        self._timeout = timeout
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._abandoned = False
        self.cancelled = False
        self._error: BaseException | None = None
        self._built: list[Inner] = []
        self.peers: frozenset[gloo.Endpoint] = frozenset()

    def run(self, peers: frozenset[gloo.Endpoint] | None) -> list[Inner]:
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
            raise AttachError(f"communicators were not built within {seconds:g} s: a member is missing.")
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
        self._device.sever(self.peers)

    def _work(self, peers: frozenset[gloo.Endpoint] | None) -> None:
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
        if store is not None:
            self._meeting.connections.give_back(store)
        with self._lock:
            wanted = not self._abandoned
            if wanted:
                self._error = error
                self._built = [] if error else list(built)
            self._over.set()
        built.clear()  # what is not wanted is freed here; the error's traceback would keep it

    def _meet(self, store: Store) -> frozenset[gloo.Endpoint]:
        """Announce this process and wait for everyone's announcement; return where their devices listen."""
        prefix, rank, size = self._meeting.prefix, self._meeting.rank, self._meeting.size
        mine = {"endpoint": self._device.endpoint, "groups": [plan.group for plan in self._plans]}
        store.set(f"{prefix}/@{rank}", json.dumps(mine))
        keys = [f"{prefix}/@{other}" for other in range(size)]
        pause_s = _FIRST_PAUSE_S
        while not store.check(keys):
            self._check_time()
            time.sleep(pause_s)  # a blocking wait could not be left, and logs a warning when it times out
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        members = [json.loads(value) for value in compat.get_all(store, keys)]
        for plan in self._plans:
            missing = [other for other in plan.ranks if plan.group not in members[other]["groups"]]
            if missing:
                raise AttachError(
                    f"ranks {missing} have no group {plan.group!r}, of which they are members.\n"
                    "Create every group during set-up or in the first two steps, so that a newcomer creates it too."
                )
        return frozenset((str(host), int(port)) for host, port in (member["endpoint"] for member in members))

    def _connect(self, store: Store, plan: Plan) -> Inner:
        prefixed = PrefixStore(f"{self._meeting.prefix}/{plan.group}", store)
        left = timedelta(seconds=max(self._deadline - time.monotonic(), 0.001))
        size = len(plan.ranks)
        backend = self._device.connect(prefixed, plan.rank, size, connect_timeout=left, timeout=plan.timeout)
        nccl_store = PrefixStore(f"{self._meeting.prefix}/{plan.group}/cuda", self._meeting.connections.store)
        return Inner(compat.plain_group(prefixed, plan.rank, size, backend), nccl_store)

    def _check_time(self) -> None:
        if self._abandoned:
            raise AttachError("abandoned")
        if time.monotonic() > self._deadline:
            raise AttachError(f"a member did not come within {self._timeout.total_seconds():g} s")
