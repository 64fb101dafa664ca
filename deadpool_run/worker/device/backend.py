"""The protocol of a device's communication library, and what describes a group to it.

A library of this kind runs ahead: a collective returns before it has run, and the host rarely waits. So a lost peer shows as
a kernel that never ends, an aborted collective looks successful and leaves garbage, and an abort may wait for other kernels.
docs/gpu.md says which of these facts each implementation rests on, and what has shown them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Store


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """A group to connect. `ranks` are the world ranks of its members; `rank` is this process's index among them."""

    group: str
    rank: int
    ranks: tuple[int, ...]
    timeout: timedelta
    on_device: bool = True
    """Whether the group may get tensors of the device: not if the script asked for Gloo alone."""
    options: Any = None
    """The library's options as the script passed them."""
    earlier: int = 0
    """How many groups of this name the script has made in this epoch, and destroyed."""

    @property
    def key(self) -> str:
        """Beginning of its members' keys in the store, below the prefix of the epoch."""
        return f"{self.group}#{self.earlier}" if self.earlier else self.group


class Mark(Protocol):
    """A point in the work that a thread has given to the device so far."""

    def passed(self) -> bool:
        """Return whether the device has done all work before the mark. Never waits."""

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for that, up to a time; return whether the device has done it."""


class DeviceBackend(Protocol):
    """A library for collectives on a device.

    `create` returns a communicator, which only the backend looks into. `abort`, `release`, `shut_down` and `connect` block
    and are called on threads of ours, never under a lock.
    """

    name: str
    """As docs, status and `torch.distributed` call it."""

    def configure(self) -> None:
        """Set what the library reads when it makes a communicator. Raises `ScriptError` for settings that end a process."""

    def handles(self, device: torch.device) -> bool:
        """Return whether collectives on this device's tensors are the library's."""

    def place(self) -> torch.device:
        """Return the device that the calling thread uses."""

    def create(self, store: Store, spec: GroupSpec, place: torch.device) -> Any:
        """Return a communicator that has no peers yet. `store` has keys of this group and epoch only."""

    def bind(self, group: ProcessGroup, communicator: Any) -> Any:
        """Return the object whose methods issue collectives on the device. `group` has no backend yet."""

    def handle(self, communicator: Any) -> str:
        """Return what the other members need to connect with this one, besides the store; empty if nothing."""

    def connect(  # noqa: PLR0913, PLR0917 - what both kinds of library need
        self,
        communicator: Any,
        store: Store,
        spec: GroupSpec,
        place: torch.device,
        handles: Sequence[str],
        timeout: timedelta,
    ) -> None:
        """Connect with the peers, which connect too. `handles` are those of all members, in their order. Raises `RuntimeError` after `timeout`, or if `abort` is called."""

    def abort(self, communicator: Any) -> None:
        """End every collective, and free the host and the device from them. May wait for other communicators' aborts."""

    def release(self, communicator: Any) -> None:
        """Free what an aborted communicator still has. Called when all aborts of the epoch have returned."""

    def shut_down(self, communicator: Any) -> None:
        """Free a communicator whose collectives have ended, without harm to peers that still run theirs."""

    def check_issue(self, what: str) -> None:
        """Raise `ScriptError` if a collective that is issued now could not be survived: in a graph that is captured."""

    def is_peer_failure(self, error: RuntimeError) -> bool:
        """Return whether a collective failed because of a peer or the network, not because of the script."""

    def failure(self, communicator: Any) -> str:
        """Return the error that the library has found by itself; empty if there is none."""

    def mark(self) -> Mark:
        """Mark the work that the calling thread has given to the device so far."""

    def streams(self) -> tuple[Any, ...]:
        """Return the streams that get the calling thread's work now. They are hashable."""

    def join(self, streams: Iterable[Any]) -> None:
        """Let later work of the calling thread wait for all that these streams have so far. The host does not wait."""
