"""The leader's connections with the agents of other nodes: joining nodes, lost nodes, and messages to them.

Silent nodes are not found here, as that takes all nodes together (`core.leadership`).
"""

import asyncio
import contextlib
from collections.abc import Collection
from typing import Protocol

from deadpool_run.errors import ProtocolError
from deadpool_run.ids import NodeId, first_id
from deadpool_run.transport.link import PeerLink
from deadpool_run.transport.link_session import LinkSession
from deadpool_run.wire import peers
from deadpool_run.wire.peer_connection import PeerConnection


class ConnectionOwner(Protocol):
    """The leader, as its connections need it."""

    @property
    def term(self) -> int:
        """The leader's term."""

    @property
    def founded(self) -> int:
        """The term in which the job began."""

    def agents(self) -> peers.Agents:
        """Return the configurations that count, with addresses."""

    def refusal(self, join: peers.Join | peers.Rejoin) -> str:
        """Return the reason why the node cannot be taken in; empty if it can."""

    def joins(self, node: NodeId, join: peers.Join) -> None:
        """Admit a new node, now or later. Until then nothing is sent to it."""

    def rejoined(self, rejoin: peers.Rejoin) -> None:
        """Go on with a node that a former leader took in. Messages can be sent to it."""

    def handle(self, node: NodeId, message: peers.ToLeader) -> None:
        """Handle a message of an agent that is admitted."""

    def hung_up(self, node: NodeId) -> None:
        """Note that the connection of a node that is not given up has ended."""


class _Connection(PeerLink):
    node: NodeId | None = None
    """Known from the first message on."""


class Connections:
    """Connections by node, in the running loop."""

    def __init__(self, owner: ConnectionOwner, taken: set[NodeId]) -> None:
        """Begin with none. `taken` are the ids that nodes have had."""
        self._owner = owner
        self._taken = taken
        self._open: set[_Connection] = set()
        self._by_node: dict[NodeId, _Connection] = {}
        self._sessions: dict[NodeId, LinkSession] = {}
        """Of every admitted node, connected or not."""
        self._rejoined: dict[NodeId, int] = {}
        """The term in which a node of a former leader was last taken in."""
        self._waiting: dict[NodeId, _Connection] = {}
        """Nodes that are not admitted yet."""
        self._end: peers.End | None = None
        """How the job ended."""
        self._all_know_end = asyncio.Event()
        self._closed = False

    def accept(self, accepted: PeerConnection) -> None:
        """Serve an authenticated connection."""
        if self._closed:
            accepted.close()
            return
        connection = _Connection(
            accepted,
            lambda message: self._handle(connection, message),
            lambda why: self._lost(connection, why),
        )
        self._open.add(connection)

    def admit(self, node: NodeId) -> bool:
        """Allow messages to a joining node; return whether it is still connected."""
        if found := self._waiting.pop(node, None):
            self._by_node[node] = found
            self._sessions[node] = LinkSession()
        return found is not None

    def nodes(self) -> Collection[NodeId]:
        """Return the nodes that are admitted, also those that may connect again."""
        return self._sessions.keys()

    def addresses(self) -> dict[str, NodeId]:
        """Return the addresses from which nodes are connected. Their workers reach this machine from the same ones."""
        return {connection.address: node for node, connection in self._by_node.items() if connection.open}

    def received(self, node: NodeId) -> int:
        """Return how many messages of a node came."""
        found = self._sessions.get(node)
        return 0 if found is None else found.received

    def confirmed(self, node: NodeId, count: int) -> None:
        """Note how many messages a node has received."""
        if found := self._sessions.get(node):
            found.confirmed(count)

    def sent(self, node: NodeId) -> int:
        """Return how many messages a node was sent, received or not."""
        found = self._sessions.get(node)
        return 0 if found is None else found.count

    def has_received(self, node: NodeId, count: int) -> bool:
        """Return whether an admitted node is known to have received this many messages."""
        found = self._sessions.get(node)
        return found is not None and found.acknowledged >= count

    def send(self, node: NodeId, message: peers.ToNode) -> None:
        """Send a message to a node, now or when it has connected again; unless it is lost."""
        self._send(node, peers.encode(message))

    def send_now(self, nodes: Collection[NodeId], frame: bytes) -> None:
        """Send an encoded message to these nodes before anything that was queued in this turn of the loop is sent to others."""
        for node in nodes:
            self._send(node, frame)
            if found := self._by_node.get(node):
                found.push()

    def send_heartbeat(self, node: NodeId, frame: bytes) -> None:
        """Send an encoded heartbeat to a node that is connected, at once: a turn of the loop may take long."""
        if found := self._by_node.get(node):
            found.send_frame(frame)
            found.push()

    def broadcast(self, message: peers.ToNode) -> None:
        """Send a message to every node."""
        data = peers.encode(message)
        for node in list(self._sessions):
            self._send(node, data)

    def evict(self, node: NodeId, reason: str) -> None:
        """Tell a node that it counts as lost, and close its connection. Its agent ends its workers."""
        self._forget_session(node)
        if found := self._by_node.pop(node, None):
            found.send(peers.Evict(reason))
            self._forget(found)

    async def end(self, message: peers.End | None, timeout_s: float = 0.0) -> None:
        """Send every agent this message, if any, and close all connections.

        Nodes can connect again until each that is admitted has confirmed the message, up to `timeout_s` seconds.
        """
        if message is not None:
            self._end = message
            self._all_know_end.clear()
            for node in list(self._waiting):
                self.admit(node)
            self.broadcast(message)
            if self._sessions:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(timeout_s):
                        await self._all_know_end.wait()
        self._closed = True
        for connection in list(self._open):
            connection.close()
        self._open.clear()
        self._by_node.clear()

    def _send(self, node: NodeId, frame: bytes) -> None:
        if session := self._sessions.get(node):
            session.sent(frame)
            if connection := self._by_node.get(node):
                connection.send_frame(frame)

    def _handle(self, connection: _Connection, message: peers.Message) -> None:
        if connection not in self._open:
            pass  # it was evicted for a message of the same read
        elif isinstance(message, peers.EndConfirmed) and self._end is not None:
            self._forget_session(connection.node)
        elif isinstance(message, peers.EndConfirmed):
            self._lost(connection, EOFError("the node was drained, and leaves"))
        elif connection.node is None:
            self._handle_first(connection, message)
        elif self._end is not None:
            pass  # the job is over
        elif connection.node in self._waiting:
            raise ProtocolError(f"it sent {type(message).__name__} before it was admitted")
        elif isinstance(message, peers.HeartbeatAck):
            self._owner.handle(connection.node, message)
        elif isinstance(message, peers.NodeReport | peers.Ask):
            self._sessions[connection.node].received += 1
            self._owner.handle(connection.node, message)
        else:
            raise ProtocolError(f"a node does not send {type(message).__name__}")

    def _handle_first(self, connection: _Connection, message: peers.Message) -> None:
        if self._end is not None and isinstance(message, peers.Join | peers.Rejoin | peers.ResumeLink):
            connection.node = None if isinstance(message, peers.Join) else message.node
            connection.send(self._end)
        elif isinstance(message, peers.Join | peers.Rejoin):
            self._take_in(connection, message)
        elif isinstance(message, peers.ResumeLink):
            self._resume(connection, message)
        else:
            raise ProtocolError(f"its first message is {type(message).__name__}, not Join, Rejoin or ResumeLink")

    def _resume(self, connection: _Connection, resume: peers.ResumeLink) -> None:
        """Go on with an admitted node over this connection; send what it did not get by the last one."""
        session = self._sessions.get(resume.node)
        if resume.term != self._owner.term:
            connection.send(self._owner.agents())  # so that it rejoins in this term
            self._forget(connection)
            return
        self._go_on(connection, resume.node, session, resume.received)

    def _go_on(self, connection: _Connection, node: NodeId, session: LinkSession | None, received: int) -> bool:
        """Send what the node did not receive; return False if that is not possible."""
        rest = None if session is None else session.rest(received)
        if session is None or rest is None:
            connection.send(peers.Evict(f"node {node} was lost, or away for too many messages"))
            return False
        if last := self._by_node.get(node):
            self._forget(last)
        connection.node = node
        self._by_node[node] = connection
        connection.send(peers.LinkResumed(session.received))
        for frame in rest:
            connection.send_frame(frame)
        return True

    def _forget_session(self, node: NodeId | None) -> None:
        if node is not None:
            self._sessions.pop(node, None)
        if not self._sessions:
            self._all_know_end.set()

    def _take_in(self, connection: _Connection, join: peers.Join | peers.Rejoin) -> None:
        if refusal := self._owner.refusal(join):
            refused = peers.End(1, refusal) if isinstance(join, peers.Join) else peers.Evict(refusal)
            connection.send(refused)
        elif isinstance(join, peers.Rejoin):
            self._taken.add(join.node)
            if self._go_on(connection, join.node, self._session_of(join), 0):
                self._owner.rejoined(join)
        else:
            connection.node = self._new_id(join.place.name)
            self._waiting[connection.node] = connection
            self._owner.joins(connection.node, join)

    def _session_of(self, rejoin: peers.Rejoin) -> LinkSession:
        """Return the node's session of this term. A node that rejoins again has heard nothing, and may have been heard."""
        session = self._sessions.get(rejoin.node)
        if session is None or self._rejoined.get(rejoin.node) != self._owner.term:
            session = self._sessions[rejoin.node] = LinkSession()
            session.received = rejoin.reports
            self._rejoined[rejoin.node] = self._owner.term
        return session

    def _new_id(self, name: str) -> NodeId:
        """Return an id that no node has had."""
        node = first = first_id(name, self._owner.founded)
        life = 1
        while node in self._taken:
            life += 1
            node = NodeId(f"{first}~{life}")
        self._taken.add(node)
        return node

    def _lost(self, connection: _Connection, why: Exception) -> None:
        if connection in self._open:
            self._forget(connection)
            node = connection.node
            if node is None or self._waiting.pop(node, None) is not None:
                return  # it was never announced
            if self._by_node.get(node) is connection:
                del self._by_node[node]
                if isinstance(why, ProtocolError):  # another connection would bring the same message
                    self._forget_session(node)
                self._owner.hung_up(node)

    def _forget(self, connection: _Connection) -> None:
        connection.close_when_flushed()
        self._open.discard(connection)
