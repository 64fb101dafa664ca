"""Gloo's connections of groups on a device: made for all groups of an epoch when one of them first needs its own.

A job on a device rarely sends CPU tensors over a group, and connecting every member with every other one is what limits an
attach of many ranks. So each member waits in the store, in a thread, until some member needs Gloo. The script takes no part
in connecting: a send between two ranks needs the others' threads only, and groups may be used in another order on each rank.

Store keys, below the epoch's prefix: `@host<rank>` is what a member waits for, and `@host` has the first member that asked.
It sets the others. A member that leaves the epoch sets its own, because any other way to end a wait in torch's store fills the log.
"""

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup, Store

from deadpool_run.errors import AttachError
from deadpool_run.worker.device.backend import GroupSpec
from deadpool_run.worker.groups import connect, gloo

_WAIT = timedelta(days=20)
"""The longest wait that torch's store can do: it counts milliseconds in 32 bits."""
_WANTED, _OVER = "wanted", "over"


class HostMesh:
    """Gloo's connections of one epoch's groups. Thread-safe."""

    def __init__(
        self, gloo_device: gloo.Device, rendezvous: connect.Rendezvous, peers: Sequence[gloo.Endpoint], *, wanted: bool
    ) -> None:
        """`wanted`: a member has asked before this epoch, so that its groups are connected, and new ones are at once."""
        self._gloo_device = gloo_device
        self._rendezvous = rendezvous
        self._peers = tuple(peers)
        self._changed = threading.Condition()
        self._asked = self._wanted = wanted
        self._over = ""
        self._missing: dict[connect.EpochGroup, GroupSpec] = {}
        self._attempts: dict[connect.EpochGroup, connect.ConnectAttempt] = {}
        self._failed: dict[connect.EpochGroup, str] = {}
        self._key = f"{rendezvous.prefix}/@host{rendezvous.rank}"
        self._watch = threading.Thread(target=self._wait_wanted, name="deadpool-host", daemon=True)
        if not wanted:
            self._watch.start()

    @property
    def is_used(self) -> bool:
        """Whether a member has needed Gloo, as far as this one knows."""
        return self._asked or self._wanted

    def add(self, spec: GroupSpec, group: connect.EpochGroup) -> None:
        """Connect this group, too, when a member needs Gloo."""
        group.need_host = partial(self._need, spec.timeout)
        with self._changed:
            self._missing[group] = spec
            if self._wanted:
                self._connect_missing()

    def remove(self, group: connect.EpochGroup) -> None:
        """Leave out a group that the script destroyed."""
        with self._changed:
            self._missing.pop(group, None)

    def _need(self, timeout: timedelta, group: connect.EpochGroup) -> ProcessGroup:
        """Return the group's Gloo connections, and make them first. Raises `AttachError` if that fails, or after `end`."""
        timeout_s = timeout.total_seconds()
        with self._changed:
            if not (self._over or self._asked):
                self._asked = True
                threading.Thread(target=self._ask, name="deadpool-host-ask", daemon=True).start()
            self._changed.wait_for(lambda: group.host is not None or group in self._failed or self._over, timeout_s)
            if group.host is not None:
                return group.host
            why = self._over or self._failed.get(group, f"a member did not connect Gloo within {timeout_s:g} s")
            raise AttachError(why)

    def end(self, reason: str) -> None:
        """Free threads that wait, and connect no more, because the epoch is over. Idempotent; any thread."""
        with self._changed:
            if self._over:
                return
            self._over = reason
            attempts = list(self._attempts.values())
            self._missing.clear()
            self._failed.clear()
            self._changed.notify_all()
        for attempt in attempts:
            attempt.cancel(reason)
        if self._watch.is_alive():  # in a thread: the store may not answer
            threading.Thread(target=self._end_watch, name="deadpool-host-end", daemon=True).start()

    def join(self, timeout_s: float) -> None:
        """After `end`, wait until no thread waits in the store any more: it would return into an interpreter that ends."""
        if self._watch.ident is not None:
            self._watch.join(timeout_s)

    def _wait_wanted(self) -> None:
        connections = self._rendezvous.connections
        try:
            store = connections.take()
            store.wait([self._key], _WAIT)
            told = store.get(self._key)
        except dist.DistError as error:
            self._fail(f"the job's store was lost: {error}")
            return
        connections.give_back(store)
        with self._changed:
            if told == _WANTED.encode() and not self._over:
                self._wanted = True
                self._connect_missing()

    def _ask(self) -> None:
        connections, prefix = self._rendezvous.connections, self._rendezvous.prefix
        mine = str(self._rendezvous.rank)
        try:
            store: Any = connections.take()
            if store.compare_set(f"{prefix}/@host", "", mine) == mine.encode():
                keys = [f"{prefix}/@host{rank}" for rank in range(self._rendezvous.size)]
                store.multi_set(keys, [_WANTED] * len(keys))
        except dist.DistError as error:
            self._fail(f"the job's store does not answer: {error}")
            return
        connections.give_back(store)

    def _end_watch(self) -> None:
        connections = self._rendezvous.connections
        with contextlib.suppress(dist.DistError):  # then the wait has ended with the store
            store: Store = connections.take()
            store.set(self._key, _OVER)
            connections.give_back(store)

    def _fail(self, why: str) -> None:
        with self._changed:
            for group in self._missing:
                self._failed[group] = why
            self._changed.notify_all()

    def _connect_missing(self) -> None:
        """Connect each group in a thread of its own: another member may have destroyed one of them, and would never come."""
        for group, spec in self._missing.items():
            attempt = connect.ConnectAttempt(
                self._gloo_device, None, self._rendezvous, [spec], spec.timeout, on_abort=lambda _: None
            )
            self._attempts[group] = attempt
            threading.Thread(
                target=self._connect, args=(group, attempt), name="deadpool-host-connect", daemon=True
            ).start()
        self._missing.clear()

    def _connect(self, group: connect.EpochGroup, attempt: connect.ConnectAttempt) -> None:
        host, why = None, ""
        try:
            (connected,) = attempt.run(self._peers)
            host = connected.host
        except AttachError as error:
            why = f"Gloo could not be connected: {error}"
        with self._changed:
            del self._attempts[group]
            if why and not self._over:
                self._failed[group] = why
            elif not self._over:
                group.host = host
            self._changed.notify_all()
