"""The coordinator's side of its connections with the agents of other nodes: who joins, who is lost, and what each is told."""

import socket
from dataclasses import dataclass
from typing import Protocol

from deadpool_run.coordinator.link import Link
from deadpool_run.core.events import Event, NodeJoined, NodeLost
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import NodeId
from deadpool_run.wire import peers
from deadpool_run.wire.facts import decode_event

_FLUSH_S = 2.0
"""At the end: how long agents may take to hear that the job is over."""


class Owner(Protocol):
    """What the hub needs of the coordinator's agent."""

    def refusal(self, join: peers.Join) -> str:
        """Return why the node cannot be taken in; empty if it can."""

    def welcome(self, node: NodeId) -> tuple[peers.Message, ...]:
        """Return what a node that joins is told first, `Joined` before all."""

    def heard(self, node: NodeId, message: peers.ToHead) -> None:
        """Take in what an agent says beside facts."""

    def submit(self, event: Event) -> None:
        """Take in a fact."""


@dataclass(slots=True)
class _Connection:
    link: Link
    node: NodeId | None = None


class Hub:
    """Every other agent by its node. Used in the running loop."""

    def __init__(self, owner: Owner, timeout_s: float, taken: NodeId) -> None:
        """Serve nobody yet. A node that is silent for `timeout_s` is lost; `taken` is our own node's id."""
        self._owner = owner
        self._timeout_s = timeout_s
        self._names = {taken}
        self._by_number: dict[int, _Connection] = {}
        self._by_node: dict[NodeId, _Connection] = {}
        self._next = 0
        self._closed = False

    def accept(self, sock: socket.socket) -> None:
        """Serve an authenticated connection."""
        number = self._next
        self._next += 1
        link = Link(
            sock,
            timeout_s=self._timeout_s,
            on_message=lambda message: self._heard(number, message),
            on_lost=lambda why, _: self._lost(number, why),
        )
        self._by_number[number] = _Connection(link)
        if self._closed:
            link.close()

    def send(self, node: NodeId, message: peers.ToNode) -> None:
        """Say something to a node; nothing happens if it is lost."""
        if found := self._by_node.get(node):
            found.link.send(message)

    def broadcast(self, message: peers.ToNode) -> None:
        """Say something to every node."""
        for connection in list(self._by_node.values()):
            connection.link.send(message)

    def evict(self, node: NodeId, reason: str) -> None:
        """Hang up on a node; its agent ends its workers."""
        if found := self._by_node.get(node):
            found.link.send(peers.Evict(reason))
            self._drop(found, reason)

    async def end(self, message: peers.End) -> None:
        """Tell every agent that the job is over, and hang up."""
        self._closed = True
        self.broadcast(message)
        for connection in list(self._by_number.values()):
            await connection.link.flush(_FLUSH_S)
            connection.link.close()
        self._by_number.clear()
        self._by_node.clear()

    def _heard(self, number: int, message: peers.Message) -> None:
        connection = self._by_number[number]
        if connection.node is None:
            if isinstance(message, peers.Join):
                self._join(connection, message)
            else:
                raise ProtocolError(f"its first word is {type(message).__name__}")
        elif isinstance(message, peers.Fact):
            self._owner.submit(decode_event(message.event))
        elif isinstance(message, peers.Safe | peers.Beat | peers.Ask):
            self._owner.heard(connection.node, message)
        else:
            raise ProtocolError(f"a node does not say {type(message).__name__}")

    def _join(self, connection: _Connection, join: peers.Join) -> None:
        if refusal := self._owner.refusal(join):
            connection.link.send(peers.End(1, refusal))
            return
        node = connection.node = self._new_name(join.place.name)
        self._by_node[node] = connection
        for message in self._owner.welcome(node):
            connection.link.send(message)
        self._owner.submit(NodeJoined(node, join.place))

    def _new_name(self, name: str) -> NodeId:
        """Return an id that no life of any node has had."""
        node, life = NodeId(name), 1
        while node in self._names:
            life += 1
            node = NodeId(f"{name}~{life}")
        self._names.add(node)
        return node

    def _lost(self, number: int, why: str) -> None:
        if connection := self._by_number.get(number):
            self._drop(connection, why)

    def _drop(self, connection: _Connection, why: str) -> None:
        connection.link.close()
        self._by_number = {number: other for number, other in self._by_number.items() if other is not connection}
        if connection.node is not None:
            self._by_node.pop(connection.node, None)
            self._owner.submit(NodeLost(connection.node, why))
