"""The coordinator's side of its connections with the agents of other nodes: who joins, whose process ends, and what each is told.

That a node is silent is not found here: it is told by who judges all nodes together.
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
"""At the end: how long agents may take to hear that the job is over."""


class ConnectionOwner(Protocol):
    """What the hub needs of the coordinator's agent."""

    def refusal(self, join: peers.Join | peers.Rejoin) -> str:
        """Return why the node cannot be taken in; empty if it can."""

    def joins(self, node: NodeId, join: peers.Join) -> None:
        """Have a new node admitted, now or later; until then nothing is said to it."""

    def rejoined(self, rejoin: peers.Rejoin) -> None:
        """Go on with a node that the last coordinator took in; it can be spoken to."""

    def heard(self, node: NodeId, message: peers.ToHead) -> None:
        """Take in what an agent says beside facts."""

    def submit(self, event: Event) -> None:
        """Take in a fact."""

    def hung_up(self, node: NodeId) -> None:
        """Note that an agent's process has ended."""


@dataclass(slots=True)
class _Connection:
    number: int
    link: PeerLink
    node: NodeId | None = None


class Connections:
    """Every other agent by its node. Used in the running loop."""

    def __init__(self, owner: ConnectionOwner, taken: set[NodeId]) -> None:
        """Serve nobody yet. `taken` are ids that nodes have had."""
        self._owner = owner
        self._names = taken
        self._by_number: dict[int, _Connection] = {}
        self._by_node: dict[NodeId, _Connection] = {}
        self._waiting: dict[NodeId, _Connection] = {}
        """Those that are not admitted yet."""
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
            lambda message: self._heard(number, message),
            lambda _, closed: self._lost(number, closed=closed),
        )
        self._by_number[number] = _Connection(number, link)

    def admit(self, node: NodeId) -> bool:
        """Speak to a node that joins from now on; tell whether it is still there."""
        if found := self._waiting.pop(node, None):
            self._by_node[node] = found
        return found is not None

    def nodes(self) -> Collection[NodeId]:
        """Return who is connected, and admitted."""
        return self._by_node.keys()

    def send(self, node: NodeId, message: peers.ToNode) -> None:
        """Say something to a node; nothing happens if it is lost."""
        if found := self._by_node.get(node):
            found.link.send(message)

    def broadcast(self, message: peers.ToNode, to: Collection[NodeId] | None = None) -> None:
        """Say the same to every node, or to these."""
        data = peers.encode(message)
        for node in list(self._by_node if to is None else to):
            if found := self._by_node.get(node):
                found.link.send_frame(data)

    def evict(self, node: NodeId, reason: str) -> None:
        """Hang up on a node, and tell it so first: its agent ends its workers."""
        if found := self._by_node.pop(node, None):
            found.link.send(peers.Evict(reason))
            self._forget(found)

    async def end(self, message: peers.End | None) -> None:
        """Tell every agent that the job is over, and hang up; without a word to them if it is not."""
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

    def _heard(self, number: int, message: peers.Message) -> None:
        connection = self._by_number[number]
        if connection.node is None:
            if isinstance(message, peers.Join | peers.Rejoin):
                self._take_in(connection, message)
            else:
                raise ProtocolError(f"its first word is {type(message).__name__}")
        elif connection.node in self._waiting:
            raise ProtocolError(f"it says {type(message).__name__} before it is taken in")
        elif isinstance(message, peers.Fact):
            self._owner.submit(message.event)
        elif isinstance(
            message, peers.Safe | peers.HeartbeatAck | peers.Ask | peers.Saved | peers.Loaded | peers.PreemptionNotice
        ):
            self._owner.heard(connection.node, message)
        else:
            raise ProtocolError(f"a node does not say {type(message).__name__}")

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
            connection.node = self._new_name(join.place.name)
            self._waiting[connection.node] = connection
            self._owner.joins(connection.node, join)

    def _new_name(self, name: str) -> NodeId:
        """Return an id that no life of any node has had."""
        node, timeline = NodeId(name), 1
        while node in self._names:
            timeline += 1
            node = NodeId(f"{name}~{timeline}")
        self._names.add(node)
        return node

    def _lost(self, number: int, *, closed: bool) -> None:
        if connection := self._by_number.get(number):
            self._forget(connection)
            if connection.node is not None and self._waiting.pop(connection.node, None) is not None:
                return  # nobody knows of it
            if connection.node is not None and self._by_node.get(connection.node) is connection:
                del self._by_node[connection.node]
                if closed:
                    self._owner.hung_up(connection.node)

    def _forget(self, connection: _Connection) -> None:
        connection.link.close_when_flushed()
        self._by_number.pop(connection.number, None)
