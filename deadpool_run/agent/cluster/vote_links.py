"""The connections on which agents choose a coordinator: made when they are needed, to every agent of the configuration."""

import asyncio
import socket
from collections.abc import Callable, Iterable

from deadpool_run.coordinator import handshake
from deadpool_run.coordinator.link import PeerLink
from deadpool_run.ids import NodeId
from deadpool_run.wire.auth import ConnectionRole, GreetingRefusedError
from deadpool_run.wire.peers import Message, Peer


class VoteLinks:
    """Speaks to agents by their node, in the running loop.

    `on_message` is told what any of them says, with a way to answer; `on_refused` whose host says that nobody listens there.
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
        """Listen to an agent that has connected."""
        if self._closed:
            sock.close()
            return
        self._accepted = [link for link in self._accepted if link.open]
        self._accepted.append(self._link(sock))

    def say(self, peers: Iterable[Peer], message: Message) -> None:
        """Say it to those that are connected, and connect to the others: it is said again soon, and reaches them then."""
        for peer in peers:
            link = self._links.get(peer.node)
            if link is not None and link.open:
                link.send(message)
            elif peer.node not in self._dialling and not self._closed:
                self._dialling.add(peer.node)
                self._loop.create_task(self._dial(peer, message))

    def close(self) -> None:
        """Hang up on everyone."""
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
            return  # it is asked again
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
