"""Vote connections: made for an election, to every agent of the configuration."""

import asyncio
import socket
from collections.abc import Callable, Iterable

from deadpool_run.coordinator import handshake
from deadpool_run.coordinator.link import PeerLink
from deadpool_run.ids import NodeId
from deadpool_run.wire.auth import ConnectionRole, GreetingRefusedError
from deadpool_run.wire.peers import Message, Peer


class VoteLinks:
    """The connections by node, in the running loop.

    `on_message` takes each message, with a function that answers it; `on_refused` the node whose host refused a connection.
    """

    def __init__(
        self,
        token: bytes,
        timeout_s: float,
        on_message: Callable[[Message, Callable[[Message], None]], None],
        on_refused: Callable[[NodeId], None],
    ) -> None:
        self._token = token
        self._timeout_s = timeout_s
        self._on_message = on_message
        self._on_refused = on_refused
        self._loop = asyncio.get_running_loop()
        self._links: dict[NodeId, PeerLink] = {}
        self._dialling: set[NodeId] = set()
        self._accepted: list[PeerLink] = []
        self._closed = False

    def accept(self, sock: socket.socket) -> None:
        """Serve an agent that has connected."""
        if self._closed:
            sock.close()
            return
        self._accepted = [link for link in self._accepted if link.open]
        self._accepted.append(self._link(sock))

    def send(self, peers: Iterable[Peer], message: Message) -> None:
        """Send it to connected agents, and connect to the others, who get it then."""
        for peer in peers:
            link = self._links.get(peer.node)
            if link is not None and link.open:
                link.send(message)
            elif peer.node not in self._dialling and not self._closed:
                self._dialling.add(peer.node)
                self._loop.create_task(self._dial(peer, message))

    def close(self) -> None:
        """Close all connections."""
        self._closed = True
        for link in (*self._links.values(), *self._accepted):
            link.close()

    async def _dial(self, peer: Peer, message: Message) -> None:
        try:
            sock = await self._loop.run_in_executor(
                None, handshake.dial, peer.address, peer.port, ConnectionRole.VOTE, self._token, self._timeout_s
            )
        except ConnectionRefusedError:
            if not self._closed:
                self._on_refused(peer.node)
            return
        except (OSError, GreetingRefusedError):
            return  # the next message dials again
        finally:
            self._dialling.discard(peer.node)
        if self._closed:
            sock.close()
            return
        self._links[peer.node] = self._link(sock)
        self._links[peer.node].send(message)

    def _link(self, sock: socket.socket) -> PeerLink:
        link = PeerLink(sock, lambda message: self._on_message(message, link.send), lambda _, __: None)
        return link
