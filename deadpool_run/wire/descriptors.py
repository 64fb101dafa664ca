"""Receives bytes with the descriptors that came with them, as `socket.recv_fds` does, but close-on-exec from the start.

`socket.recv_fds` of Python 3.11 drops its flags. A program that the script starts would keep the memory of snapshots.
"""

import array
import socket


def receive(sock: socket.socket, most_bytes: int, most_fds: int) -> tuple[bytes, list[int]]:
    """Return what came over a UNIX socket; no bytes if the peer has closed it. Raises OSError."""
    fds = array.array("i")
    room = socket.CMSG_LEN(most_fds * fds.itemsize)
    data, ancillary, _, _ = sock.recvmsg(most_bytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, body in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(body[: len(body) - len(body) % fds.itemsize])
    return data, list(fds)
