"""Connections between agents without a greeting: both ends of a test know the keys."""

import socket

from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.seal import KEY_BYTES, Seal

_KEY = bytes(range(KEY_BYTES))


def sealed(sock):
    """The connection as after a greeting. Both directions have one key, so that it does not matter which end this is."""
    return PeerConnection(sock, Seal(_KEY), Seal(_KEY))


def sealed_pair():
    """Two ends of one connection."""
    one, other = socket.socketpair()
    return sealed(one), sealed(other)
