"""Connections between agents without a greeting. Both ends use a fixed key."""

import socket

from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.seal import KEY_BYTES, Seal

_KEY = bytes(range(KEY_BYTES))


def sealed(sock):
    """Return the connection in its state after a greeting. Both directions have the same key, so both ends are alike."""
    return PeerConnection(sock, Seal(_KEY), Seal(_KEY))


def sealed_pair():
    """Return the two ends of one connection."""
    one, other = socket.socketpair()
    return sealed(one), sealed(other)
