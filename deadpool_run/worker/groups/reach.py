"""Which peers of a failed attempt to connect were not reached. The coordinator replaces a rank that most others name."""

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address

from torch.distributed.distributed_c10d import Store

from deadpool_run.ids import Rank
from deadpool_run.worker.groups.gloo import Endpoint

_AT_A_TIME = 256
"""The most connections that are open at once."""
_LOOK_S = 0.05
"""How often a search looks whether it was cancelled."""
_UNREACHED = (errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT)


def absent(store: Store, keys: Sequence[str]) -> list[int]:
    """Return the positions of the keys that the store does not have. Raises torch's `DistError`."""
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [0]
    half = len(keys) // 2
    return [*absent(store, keys[:half]), *(half + each for each in absent(store, keys[half:]))]


def unreachable(
    endpoints: Mapping[Rank, Endpoint], limit_s: float, cancelled: Callable[[], bool] = lambda: False
) -> list[Rank]:
    """Return the ranks to whose endpoints no TCP connection could be made within `limit_s` seconds, for all of them together.

    A rank that could not be tried in that time is left out. After `cancelled` returns True, the result is empty. Each connection
    is closed at once.
    """
    deadline = time.monotonic() + limit_s
    failed: list[Rank] = []
    ranks = sorted(endpoints)
    for begin in range(0, len(ranks), _AT_A_TIME):
        if time.monotonic() >= deadline:
            break
        failed += _try(endpoints, ranks[begin : begin + _AT_A_TIME], deadline, cancelled)
    return [] if cancelled() else failed


def _try(
    endpoints: Mapping[Rank, Endpoint], ranks: Sequence[Rank], deadline: float, cancelled: Callable[[], bool]
) -> list[Rank]:
    failed: list[Rank] = []
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        for rank in ranks:
            try:
                address, port = endpoints[rank]
                is_v6 = ip_address(address).version == 6
                sock = stack.enter_context(socket.socket(socket.AF_INET6 if is_v6 else socket.AF_INET))
                sock.setblocking(False)
                error = sock.connect_ex((address, port))
            except (OSError, ValueError, OverflowError):  # no descriptor is free, or the peer's entry is none
                continue
            if error in (0, errno.EINPROGRESS):
                selector.register(sock, selectors.EVENT_WRITE, rank)
            elif error in _UNREACHED:
                failed.append(rank)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0 and not cancelled():
            for key, _ in selector.select(min(left, _LOOK_S)):
                assert isinstance(key.fileobj, socket.socket)
                if key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _UNREACHED:
                    failed.append(key.data)
                selector.unregister(key.fileobj)
        failed += [key.data for key in selector.get_map().values()]
    return sorted(failed)
