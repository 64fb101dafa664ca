"""The leader's connections with the agents of other nodes: joining nodes, lost nodes, and messages to them.

Silent nodes are not found here, as that takes all nodes together (`core.leadership`).
"""

import socket
from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from deadpool_run.coordinator.link import PeerLink
from deadpool_run.core.events import Event
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import NodeId
from deadpool_run.wire import peers

_FLUSH_S = 2.0
"""Limit for telling an agent that the job is over."""


class ConnectionOwner(Protocol):
    """The leader, as its connections need it."""

    def refusal(self, join: peers.Join | peers.Rejoin) -> str:
        """Return the reason why the node cannot be taken in; empty if it can."""

    def joins(self, node: NodeId, join: peers.Join) -> None:
        """Admit a new node, now or later. Until then nothing is sent to it."""

    def rejoined(self, rejoin: peers.Rejoin) -> None:
        """Go on with a node that a former leader took in. Messages can be sent to it."""

    def heard(self, node: NodeId, message: peers.ToLeader) -> None:
        """Handle any message of an agent but `Fact`."""

    def submit(self, event: Event) -> None:
        """Handle an event."""

    def hung_up(self, node: NodeId) -> None:
        """Note that an agent's process has ended."""


@dataclass(slots=True)
class _Connection:
    number: int
    link: PeerLink
    node: NodeId | None = None


class Connections:
    """Connections by node, in the running loop."""

    def __init__(self, owner: ConnectionOwner, taken: set[NodeId]) -> None:
        """Begin with none. `taken` are the ids that nodes have had."""
        self._owner = owner
        self._taken = taken
        self._by_number: dict[int, _Connection] = {}
        self._by_node: dict[NodeId, _Connection] = {}
        self._waiting: dict[NodeId, _Connection] = {}
        """Nodes that are not admitted yet."""
        self._next = 0
        self._closed = False

    def accept(self, sock: socket.socket) -> None:
        """Serve an authenticated connection."""
        if self._closed:
            sock.close()
            return
        number = self._next
        self._next += 1
        link = PeerLink(
            sock,
            lambda message: self._handle(number, message),
            lambda _, closed: self._lost(number, closed=closed),
        )
        self._by_number[number] = _Connection(number, link)

    def admit(self, node: NodeId) -> bool:
        """Allow messages to a joining node; return whether it is still connected."""
        if found := self._waiting.pop(node, None):
            self._by_node[node] = found
        return found is not None

    def nodes(self) -> Collection[NodeId]:
        """Return the nodes that are connected and admitted."""
        return self._by_node.keys()

    def send(self, node: NodeId, message: peers.ToNode) -> None:
        """Send a message to a node, unless it is lost."""
        if found := self._by_node.get(node):
            found.link.send(message)

    def broadcast(self, message: peers.ToNode, to: Collection[NodeId] | None = None) -> None:
        """Send a message to every node, or to these."""
        data = peers.encode(message)
        for node in list(self._by_node if to is None else to):
            if found := self._by_node.get(node):
                found.link.send_frame(data)

    def evict(self, node: NodeId, reason: str) -> None:
        """Tell a node that it counts as lost, and close its connection. Its agent ends its workers."""
        if found := self._by_node.pop(node, None):
            found.link.send(peers.Evict(reason))
            self._forget(found)

    async def end(self, message: peers.End | None) -> None:
        """Send every agent this message, if any, and close all connections."""
        self._closed = True
        if message is not None:
            for node in list(self._waiting):
                self.admit(node)
            self.broadcast(message)
        for connection in list(self._by_number.values()):
            if message is not None:
                await connection.link.flush(_FLUSH_S)
            connection.link.close()
        self._by_number.clear()
        self._by_node.clear()

    def _handle(self, number: int, message: peers.Message) -> None:
        connection = self._by_number[number]
        if connection.node is None:
            if isinstance(message, peers.Join | peers.Rejoin):
                self._take_in(connection, message)
            else:
                raise ProtocolError(f"its first message is {type(message).__name__}, not Join or Rejoin")
        elif connection.node in self._waiting:
            raise ProtocolError(f"it sent {type(message).__name__} before it was admitted")
        elif isinstance(message, peers.Fact):
            self._owner.submit(message.event)
        elif isinstance(
            message, peers.Safe | peers.HeartbeatAck | peers.Ask | peers.Saved | peers.Loaded | peers.PreemptionNotice
        ):
            self._owner.heard(connection.node, message)
        else:
            raise ProtocolError(f"a node does not send {type(message).__name__}")

    def _take_in(self, connection: _Connection, join: peers.Join | peers.Rejoin) -> None:
        if refusal := self._owner.refusal(join):
            refused = peers.End(1, refusal) if isinstance(join, peers.Join) else peers.Evict(refusal)
            connection.link.send(refused)
            return
        if isinstance(join, peers.Rejoin):
            connection.node = join.node
            self._by_node[join.node] = connection
            self._owner.rejoined(join)
        else:
            connection.node = self._new_id(join.place.name)
            self._waiting[connection.node] = connection
            self._owner.joins(connection.node, join)

    def _new_id(self, name: str) -> NodeId:
        """Return an id that no node has had."""
        node, life = NodeId(name), 1
        while node in self._taken:
            life += 1
            node = NodeId(f"{name}~{life}")
        self._taken.add(node)
        return node

    def _lost(self, number: int, *, closed: bool) -> None:
        if connection := self._by_number.get(number):
            self._forget(connection)
            if connection.node is not None and self._waiting.pop(connection.node, None) is not None:
                return  # it was never announced
            if connection.node is not None and self._by_node.get(connection.node) is connection:
                del self._by_node[connection.node]
                if closed:
                    self._owner.hung_up(connection.node)

    def _forget(self, connection: _Connection) -> None:
        connection.link.close_when_flushed()
        self._by_number.pop(connection.number, None)
