"""Ends of connections in one event loop, for tests. An end keeps its messages, and waits for them with a bound."""

import asyncio
import socket

from deadpool_run.transport.link import PeerLink
from deadpool_run.wire import peers
from kit.tagged import tagged_pair

LOOPBACK = "127.0.0.1"
BOUND_S = 10.0
"""The longest wait of a test."""


def within_bound(main):
    """Run the coroutine. Raise TimeoutError after the bound."""
    asyncio.run(asyncio.wait_for(main, 2 * BOUND_S))


class Changes:
    """Changes that a test waits for."""

    def __init__(self):
        self._changed = asyncio.Event()

    def tell(self):
        self._changed.set()

    async def until(self, condition):
        """Wait until the condition is true. It is checked after each change."""
        while not condition():
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), BOUND_S)


class End(Changes):
    """A link that keeps the messages it receives, and the reason of its end."""

    def __init__(self, connection):
        super().__init__()
        self.heard, self.lost = [], []
        self.link = PeerLink(connection, self._hear, self._lose)

    def _hear(self, message):
        self.heard.append(message)
        self.tell()

    def _lose(self, why):
        self.lost.append((str(why), isinstance(why, ConnectionResetError)))
        self.tell()

    def send(self, *messages):
        for message in messages:
            self.link.send(message)

    async def hears(self, count):
        """Wait for `count` messages, and return them."""
        await self.until(lambda: len(self.heard) >= count or self.lost)
        return self.heard[:count]

    async def is_lost(self):
        """Wait for the end of the link. Return the reason, and whether the other side closed it."""
        await self.until(lambda: self.lost)
        (only,) = self.lost
        return only

    def close(self):
        self.link.close()


class NodeEnd(End):
    """A node's end of a link. It confirms the end of the job."""

    def _hear(self, message):
        if isinstance(message, peers.End):
            self.send(peers.EndConfirmed())
        super()._hear(message)


def pair():
    """The two ends of one connection."""
    one, other = tagged_pair()
    return End(one), End(other)


def listening():
    """A bound socket, for a server."""
    sock = socket.socket()
    sock.bind((LOOPBACK, 0))
    return sock


def tcp_pair():
    """Two sockets of one connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other
