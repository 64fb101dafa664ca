"""Not to wait for name servers that do not answer.

Torch asks for the names of the addresses that it connects to, only to log them, and we give it numbers. Where no name
server answers, that takes ten seconds and more.

`RES_OPTIONS` would do, but it holds for the whole process: the user's own look-ups have to stay as patient as they were.
"""

import contextlib
import ctypes
from collections.abc import Iterator

_RES_INIT = 1
_TIMEOUT_S = 1
_ATTEMPTS = 1


class _ResState(ctypes.Structure):
    """The beginning of glibc's `struct __res_state` (resolver(3)): of each thread one, the same layout since ever."""

    _fields_ = (
        ("retrans", ctypes.c_int),  # seconds until a server is asked again
        ("retry", ctypes.c_int),  # how often all servers are asked
        ("options", ctypes.c_ulong),
    )


@contextlib.contextmanager
def in_a_hurry() -> Iterator[None]:
    """Have this thread's look-ups take a second for each name server at most. Other C libraries than glibc: no effect."""
    state = _state_of_thread()
    if state is None:
        yield
        return
    before = state.retrans, state.retry
    state.retrans, state.retry = _TIMEOUT_S, _ATTEMPTS
    try:
        yield
    finally:
        state.retrans, state.retry = before


def none_in_process() -> None:
    """Have this process ask no name server ever; names are those of /etc/hosts. Other C libraries: no effect."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None)["__nss_configure_lookup"](b"hosts", b"files")


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
