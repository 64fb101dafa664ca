"""Short timeouts for DNS look-ups that torch makes only for its log.

Torch looks up the names of the addresses it connects to. If no name server answers, that takes ten seconds and more.
`RES_OPTIONS` would shorten the look-ups of the whole process, the user's too.
"""

import contextlib
import ctypes
from collections.abc import Iterator

_RES_INIT = 1


class _ResState(ctypes.Structure):
    """The first fields of glibc's `struct __res_state` (resolver(3)), one per thread; the layout has never changed."""

    _fields_ = (
        ("retrans", ctypes.c_int),  # seconds until a server is asked again
        ("retry", ctypes.c_int),  # how often all servers are asked
        ("options", ctypes.c_ulong),
    )


@contextlib.contextmanager
def short_timeout() -> Iterator[None]:
    """Limit this thread's look-ups to one second per name server. No effect without glibc."""
    state = _state_of_thread()
    if state is None:
        yield
        return
    before = state.retrans, state.retry
    state.retrans, state.retry = 1, 1
    try:
        yield
    finally:
        state.retrans, state.retry = before


def _state_of_thread() -> _ResState | None:
    libc = ctypes.CDLL(None)
    try:
        get_state, initialize = libc["__res_state"], libc["__res_init"]
    except AttributeError:
        return None
    get_state.restype = ctypes.POINTER(_ResState)
    state: _ResState = get_state().contents
    if not state.options & _RES_INIT:
        initialize()
    return state
