"""Connections between agents without a greeting. Both ends use a fixed key."""

import socket

from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.tags import KEY_BYTES, Tagger

_KEY = bytes(range(KEY_BYTES))


def tagged(sock):
    """Return the connection in its state after a greeting. Both directions have the same key, so both ends are alike."""
    return PeerConnection(sock, Tagger(_KEY), Tagger(_KEY))


def tagged_pair():
    """Return the two ends of one connection."""
    one, other = socket.socketpair()
    return tagged(one), tagged(other)
