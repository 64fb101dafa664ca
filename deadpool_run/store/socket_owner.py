"""The user at the other end of a TCP connection, as the kernel of that end's machine knows it.

The kernel answers for its own sockets only, so the answer proves something only on the machine of the socket that was asked for.
It is asked over netlink (sock_diag(7)); where that is not allowed, /proc/net/tcp and /proc/net/tcp6 say the same, slower.
"""

import errno
import os
import socket
import struct
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

Address = tuple[str, int]
"""An IP literal and a port."""

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY, _NLMSG_ERROR, _NLM_F_REQUEST = 4, 20, 2, 1
_HEADER = struct.Struct("=LHHLL")
"""nlmsghdr: length, type, flags, sequence, port."""
_REQUEST = struct.Struct("=BBBxL")
"""inet_diag_req_v2 before its inet_diag_sockid: family, protocol, extensions, states."""
_SOCKET_ID = struct.Struct("!HH16s16s4x8s")
"""inet_diag_sockid: the ports and addresses of the socket and of its peer, any interface, the cookie."""
_ANSWER = struct.Struct("=BBxx48xLLLLL")
"""inet_diag_msg: family, state; expires, unread, unsent, user, inode."""
_ANY_COOKIE = b"\xff" * 8
_ANSWER_BYTES = 8192
_ANSWER_S = 1.0
_ESTABLISHED = 1
_ROOT = 0


class SocketOwners:
    """Asks the kernel of this machine (of this network namespace). Not thread-safe."""

    def __init__(self) -> None:
        self._sequence = 0
        try:
            self._netlink: socket.socket | None = socket.socket(
                socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG
            )
            self._netlink.settimeout(_ANSWER_S)
        except OSError:
            self._netlink = None

    def uid(self, local: Address, remote: Address) -> int | None:
        """Return the user of this machine's socket that is connected from `local` to `remote`.

        None if there is no such socket here, or if its process has closed it.
        """
        found = None if self._netlink is None else self._by_netlink(self._netlink, local, remote)
        if self._netlink is None:  # perhaps only now
            found = next(_in_proc(local, remote), None)
        return found

    def close(self) -> None:
        """Free the descriptor."""
        if self._netlink is not None:
            self._netlink.close()

    def _by_netlink(self, netlink: socket.socket, local: Address, remote: Address) -> int | None:
        """Ask over netlink. If that does not work here, it is not tried again."""
        here, there = ip_address(local[0]), ip_address(remote[0])
        family = socket.AF_INET if here.version == 4 else socket.AF_INET6
        self._sequence += 1
        packed = (each.packed.ljust(16, b"\0") for each in (here, there))
        body = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 1 << _ESTABLISHED)
        body += _SOCKET_ID.pack(local[1], remote[1], *packed, _ANY_COOKIE)
        header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, self._sequence, 0)
        try:
            netlink.send(header + body)
            while True:
                answer = netlink.recv(_ANSWER_BYTES)
                _, kind, _, sequence, _ = _HEADER.unpack_from(answer)
                if sequence == self._sequence:
                    break
        except OSError:
            kind, error = _NLMSG_ERROR, 0
        else:
            (error,) = struct.unpack_from("=i", answer, _HEADER.size)
        if kind == _NLMSG_ERROR:
            if error != -errno.ENOENT:  # else there is no such socket
                self.close()
                self._netlink = None
            return None
        _, state, _, _, _, uid, inode = _ANSWER.unpack_from(answer, _HEADER.size)
        return _user(state, uid, inode)


def may_use_store(uid: int) -> bool:
    """Return whether the job's store serves processes of this user: its own, and root's, which may do anything here."""
    return uid in {_ROOT, os.getuid()}


def _user(state: int, uid: int, inode: int) -> int | None:
    """Return the user of a connected socket; None if its process has closed it."""
    return uid if state == _ESTABLISHED and inode else None


def _in_proc(local: Address, remote: Address) -> Iterator[int | None]:
    """Yield the socket's user from the tables of proc(5), if it is there. One with IPv4-mapped addresses is in the second."""
    here, there = ip_address(local[0]), ip_address(remote[0])
    tables = [("/proc/net/tcp6", _hex(here, mapped=True, port=local[1]), _hex(there, mapped=True, port=remote[1]))]
    if here.version == 4:
        tables.insert(0, ("/proc/net/tcp", _hex(here, port=local[1]), _hex(there, port=remote[1])))
    for table, mine, theirs in tables:
        try:
            lines = Path(table).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for line in lines[1:]:
            _, at, to, state, _, _, _, uid, _, inode, *_ = line.split()
            if (at, to) == (mine, theirs):
                yield _user(int(state, 16), int(uid), int(inode))


def _hex(address: IPv4Address | IPv6Address, *, port: int, mapped: bool = False) -> str:
    """Return an address as /proc/net/tcp has it: words of 4 bytes in the machine's order, then the port."""
    packed = address.packed
    if mapped and len(packed) == 4:
        packed = bytes(10) + b"\xff\xff" + packed
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"
