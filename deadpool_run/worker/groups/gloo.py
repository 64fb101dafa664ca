"""The Gloo backend of a group: one device per process, and a way to abort its collectives.

Gloo has no abort: a collective ends early only when its connections break. So `sever` shuts down (never closes) the
sockets between this process's device and its peers'. It knows them by address: an accepted socket has the device's own
port, a connecting one has a peer's device at its other end. Listeners and other sockets match neither. Shutting down a
listener would make Gloo terminate the process.
"""

import os
import re
import socket
import stat
import time
from collections.abc import Collection, Iterator
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroupGloo, Store

from deadpool_run.errors import AttachError
from deadpool_run.worker.compat import c10d

ADDRESS_VARIABLE = "DEADPOOL_NODE_ADDR"
"""The numeric address by which peers reach this node. The user's GLOO_SOCKET_IFNAME overrides it."""
_DEVICE_ATTEMPTS = 5
_UNANSWERED_MS = 5000
"""The kernel stops sending the rest of a severed connection after this long without an answer."""
_PEER_FAILURE = re.compile(
    r"gloo[/\\]transport|time[d]?[ -]?out|connection|broken pipe|socket|closed by peer", re.IGNORECASE
)
_WORK_THREAD = "pt_gloo_runloop"
"""Torch's name for the threads that run Gloo's collectives."""
_BROKEN = re.compile(r"closed by peer|connection reset|broken pipe|pair closure", re.IGNORECASE)

Endpoint = tuple[str, int]
"""Address and port on which a device accepts its peers."""


class Device:
    """The process's Gloo device: one listener and one I/O thread, shared by all groups and epochs."""

    def __init__(self) -> None:
        for _ in range(_DEVICE_ATTEMPTS):
            before = _listeners()
            self.handle = _create_device()
            new = _listeners() - before
            if len(new) == 1:  # else another thread opened a listener too, and ours is not known
                (self.endpoint,) = new
                return
        raise AttachError(
            f"the listener of the Gloo device was not identified in {_DEVICE_ATTEMPTS} attempts: other threads of this process open "
            "listening sockets at the same time.\nOpen listening sockets before deadpool_run.init(), or after it."
        )

    def connect(self, store: Store, rank: int, size: int, *, connect_timeout: timedelta, timeout: timedelta) -> Any:
        """Return a Gloo backend connected to all its peers; blocks up to `connect_timeout`.

        `timeout` is that of its collectives. Raises Gloo's own errors.
        """
        options = c10d.gloo_options(self.handle, threads=2, timeout=connect_timeout)
        backend = ProcessGroupGloo(store, rank, size, options)
        backend.set_timeout(timeout)
        return backend

    def sever(self, peers: Collection[Endpoint]) -> None:
        """Shut down every connection between this device and `peers`."""
        for sock in _sockets():
            try:
                if _endpoint(sock.getsockname()) == self.endpoint or _endpoint(sock.getpeername()) in peers:
                    sock.getpeername()  # raises for a listener, which must not be touched
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED_MS)
                    sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # not connected: a listener, or the other end has gone


def is_peer_failure(error: RuntimeError) -> bool:
    """Return whether a collective failed because of a peer (a broken connection, a timeout), not because of its arguments."""
    if isinstance(error, NotImplementedError):
        return False
    if isinstance(error, dist.DistError):
        return True
    message = str(error).partition("\nException raised from")[0]
    return _PEER_FAILURE.search(message) is not None


def is_broken(error: RuntimeError) -> bool:
    """Return whether a connection broke; else the collective timed out."""
    return _BROKEN.search(str(error)) is not None


def hold_until_idle(_group: Any) -> None:
    """Wait until Gloo's threads are idle, up to a second. For torch's own groups, at the process's exit.

    A thread that drops the last collective's tensors after the interpreter has gone calls `terminate`. Destroying the
    group first does not help, because DDP's reducer or FSDP keeps it. Torch has no event for the drop, so poll. The
    argument keeps the group alive until then: freed elsewhere, it may wait for its threads while they wait for the
    interpreter.
    """
    idle = 0
    deadline = time.monotonic() + 1.0
    while idle < 2 and time.monotonic() < deadline:  # twice: a sleeping thread may be waiting for a lock
        time.sleep(0.001)  # releases the interpreter's lock, which they may need
        idle = idle + 1 if all(state == "S" for state in _work_threads()) else 0


def _work_threads() -> Iterator[str]:
    """Yield the state of each thread that runs collectives (proc(5): R running, S sleeping)."""
    for task in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (task / "stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")
        except OSError:  # the thread has ended
            continue
        if name.partition("(")[2] == _WORK_THREAD:
            yield rest[0]


def _create_device() -> Any:
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if interface:
        return ProcessGroupGloo.create_device(interface=interface)
    return ProcessGroupGloo.create_device(hostname=os.environ.get(ADDRESS_VARIABLE) or "127.0.0.1")


def _sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of the process: the number of the original may be reused."""
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers, not paths
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = os.dup(int(name))
        except OSError:
            continue  # closed since it was listed
        try:
            sock = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)  # the number was reused, not for a socket
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock


def _listeners() -> set[Endpoint]:
    return {
        _endpoint(sock.getsockname()) for sock in _sockets() if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    }


def _endpoint(address: tuple[Any, ...]) -> Endpoint:
    """Return the address in canonical form: IPv4-mapped IPv6 as IPv4, without scope."""
    ip = ip_address(str(address[0]).partition("%")[0])
    mapped = getattr(ip, "ipv4_mapped", None)
    return str(mapped or ip), int(address[1])
