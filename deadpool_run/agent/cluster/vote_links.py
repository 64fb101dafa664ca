"""Vote connections between two agents, made when an election or a broken connection needs them."""

import asyncio
from collections.abc import Callable, Iterable

from deadpool_run.agent.tasks import Tasks
from deadpool_run.ids import NodeId
from deadpool_run.transport import handshake
from deadpool_run.transport.link import PeerLink
from deadpool_run.wire.auth import ConnectionRole, Credentials, GreetingRefusedError
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.peers import Message, Peer

_REFUSED = 0.1
"""A host that refuses for this many node timeouts has no agent: one that starts, or greets too many others, refuses for less."""
_PATIENCE = 0.5
"""Node timeouts for a connection, and again for its greeting: one that only one end knows of is not to cost a node."""
_DIALS = 256
"""At once: a new leader dials every node, and each greeting has a time limit."""
_PAUSE = 0.05
"""Node timeouts between two probes of an agent."""


class VoteLinks:
    """The connections by node, in the running loop.

    `on_message` takes each message, with a function that answers it; `on_refused` the node whose host refuses connections.
    """

    def __init__(
        self,
        credentials: Credentials,
        timeout_s: float,
        on_message: Callable[[Message, Callable[[Message], None]], None],
        on_refused: Callable[[NodeId], None],
    ) -> None:
        self._credentials = credentials
        self._timeout_s = timeout_s
        self._on_message = on_message
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._links: dict[NodeId, PeerLink] = {}
        self._dialling: set[NodeId] = set()
        self._accepted: list[PeerLink] = []
        self._refused_since: dict[NodeId, float] = {}
        self._tasks = Tasks()
        self._dials = asyncio.Semaphore(_DIALS)
        self._closed = False

    def accept(self, connection: PeerConnection) -> None:
        """Serve an agent that has connected."""
        if self._closed:
            connection.close()
            return
        self._accepted = [link for link in self._accepted if link.open]
        self._accepted.append(self._link(connection))

    def send(self, peers: Iterable[Peer], message: Message) -> None:
        """Send it to connected agents, and connect to the others, who get it then."""
        for peer in peers:
            link = self._links.get(peer.node)
            if link is not None and link.open:
                link.send(message)
            elif peer.node not in self._dialling and not self._closed:
                self._dialling.add(peer.node)
                self._tasks.start(self._dial(peer, message))

    def probe(self, peers: Iterable[Peer]) -> None:
        """Find out whether the hosts of these agents refuse connections, within a node timeout."""
        for peer in peers:
            if peer.node not in self._dialling and not self._closed:
                self._dialling.add(peer.node)
                self._tasks.start(self._probe(peer))

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        self._tasks.cancel()
        for link in (*self._links.values(), *self._accepted):
            link.close()

    async def _dial(self, peer: Peer, message: Message) -> None:
        try:
            if await self._is_connected(peer):
                self._links[peer.node].send(message)
        finally:
            self._dialling.discard(peer.node)

    async def _probe(self, peer: Peer) -> None:
        until = self._loop.time() + self._timeout_s
        try:
            while self._loop.time() < until:
                if await self._is_connected(peer):
                    return
                await asyncio.sleep(_PAUSE * self._timeout_s)
        finally:
            self._dialling.discard(peer.node)

    async def _is_connected(self, peer: Peer) -> bool:
        """Connect; return whether that succeeded."""
        try:
            async with self._dials:
                connection = await handshake.connect(
                    peer.address, peer.port, ConnectionRole.VOTE, self._credentials, _PATIENCE * self._timeout_s
                )
        except ConnectionRefusedError:
            now = self._loop.time()
            if now >= self._refused_since.setdefault(peer.node, now) + _REFUSED * self._timeout_s:
                self._on_refused(peer.node)
            return False
        except (OSError, GreetingRefusedError):
            return False  # the next message dials again
        self._refused_since.pop(peer.node, None)
        if self._closed:
            connection.close()
            return False
        if last := self._links.get(peer.node):
            last.close()
        self._links[peer.node] = self._link(connection)
        return True

    def _link(self, connection: PeerConnection) -> PeerLink:
        link = PeerLink(connection, lambda message: self._on_message(message, link.send))
        return link
