"""The control socket's address, for run directories of any length.

The path of a UNIX socket has at most 107 bytes (unix(7)). Both sides name a socket with a longer path through a handle on its
directory: `/proc/self/fd/N/control.sock`.
"""

import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAMPLES_NAME = "samples.jsonl"
"""Samples of the run's progress."""
SOCKET_NAME = "control.sock"
POINTER_NAME = "leader.json"
"""Next to the socket or one folder above it: names the leader. See `agent.cluster.leader_file`."""
JOURNAL_NAME, JOURNALS = "journal.jsonl", "journal*.jsonl"
"""The journal of decisions, and the pattern of all journals of a run."""
_MAX_PATH_BYTES = 107
_PEER = struct.Struct("iII")  # struct ucred of unix(7): pid, uid, gid


@contextmanager
def control_address(run_dir: Path) -> Iterator[str]:
    """Yield the path to bind or to connect to, valid in the block only. Raises OSError if there is no directory."""
    path = str(run_dir / SOCKET_NAME)
    if len(os.fsencode(path)) <= _MAX_PATH_BYTES:
        yield path
        return
    handle = os.open(run_dir, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET_NAME}"
    finally:
        os.close(handle)


def peer_of(connected: socket.socket) -> tuple[int, int]:
    """Return the pid and the user of the process at the other end of a UNIX socket."""
    pid, uid, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid
