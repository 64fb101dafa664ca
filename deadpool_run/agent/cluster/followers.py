"""The other nodes of a job that is led from here: told, heard, counted, and two of them kept ready to take over."""

import asyncio
import socket
from collections.abc import Iterable, Mapping
from typing import Protocol, assert_never

from deadpool_run.agent.checkpoint.leader import CheckpointLeader
from deadpool_run.agent.cluster.leadership import Leadership
from deadpool_run.coordinator.connections import Connections
from deadpool_run.coordinator.requests import RequestHandler
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core.events import Event, NodeJoined, NodeLost, NodeResynced, NodesLost
from deadpool_run.core.leadership import electorate
from deadpool_run.core.state import State
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import NodeId
from deadpool_run.view.status_report import Seen
from deadpool_run.wire import peers, typed
from deadpool_run.wire.facts import decode_event, encode

PULSES = 5
"""Signs of life per time-out."""


class Leading(Protocol):
    """What followers need of the leader's coordinator."""

    request_handler: RequestHandler
    durable: CheckpointLeader

    @property
    def state(self) -> State:
        """The job's state, to read only."""

    @property
    def server(self) -> CoordinatorServer:
        """The shell of the coordinator."""

    def submit(self, event: Event) -> None:
        """Take in a fact."""

    def safe(self, told: peers.Safe) -> None:
        """Take in which copies are complete."""

    def mirror(self, node: NodeId, rank_entries: Iterable[tuple[int, ...]]) -> None:
        """Publish the status pages of another node."""

    def durable_news_of(self, node: NodeId, told: peers.Saved | peers.Loaded | peers.PreemptionNotice) -> None:
        """Take in news of a durable checkpoint."""

    def welcome(self, node: NodeId) -> tuple[peers.ToNode, ...]:
        """Return what a node that joins is told first."""

    def world(self) -> peers.World:
        """Return the world as it is."""


class Followers:
    """Every node but our own, in the running loop."""

    def __init__(self, leader: Leading, leadership: Leadership, nproc_per_node: int) -> None:
        self._leader = leader
        self._leadership = leadership
        self._nproc_per_node = nproc_per_node
        self._connections = Connections(
            self, {NodeId(name) for name in (*leader.state.leaves, leadership.agent.me) if name}
        )
        self._log_followers: set[NodeId] = set()
        """Those that follow the log."""
        self._configuration: electorate.Configuration | None = None
        self._wanted: set[NodeId] = set()
        """Those that are to, of that configuration."""
        self._joining: dict[NodeId, peers.Join] = {}
        """Nodes that are to be taken in together, once a majority knows of the last change of the configuration.

        Each change is told to every node, and thousands of nodes may come within seconds.
        """
        self._seen: dict[NodeId, Seen] = {}
        self._losses: list[NodeLost] = []
        """Found in this turn of the loop, and not told yet."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        leader.server.on_entry = self._log
        self._heartbeat()

    # --- speaking -------------------------------------------------------------------------------------------------

    def send(self, node: NodeId, message: peers.ToNode) -> None:
        """Say something to a node; nothing happens if it is lost."""
        self._connections.send(node, message)

    def broadcast(self, message: peers.ToNode) -> None:
        """Say something to every node."""
        self._connections.broadcast(message)

    def share(self, agents: peers.Agents) -> None:
        """Tell every node who counts now."""
        self.broadcast(agents)
        if self._joining and len(agents.configurations) == 1:
            self._loop.call_soon(self._take_in)  # whoever says so is in the middle of it

    def lose(self, node: NodeId, reason: str) -> None:
        """Hang up on a node, and tell the coordinator: in one word of all that are lost in this turn of the loop.

        Where a switch breaks, many connections end at once; each loss alone would be a repair of its own.
        """
        self._connections.evict(node, reason)
        self._log_followers.discard(node)
        self._seen.pop(node, None)
        self._leader.durable.node_lost(node)
        if not self._losses:
            self._loop.call_soon(self._tell_losses)
        self._losses.append(NodeLost(node, reason))

    def _tell_losses(self) -> None:
        losses, self._losses = tuple(self._losses), []
        self._leader.submit(losses[0] if len(losses) == 1 else NodesLost(losses))

    def decided(self) -> None:
        """Bring those who are to take over up to date, if they are others than before."""
        if self._leader.state.move is not None:
            return  # what is deferred is not told; there will be a decision when it is over
        configuration = self._leadership.agent.configuration
        if configuration is not self._configuration:  # who is next is looked for in all of it, and decisions are many
            self._configuration, self._wanted = configuration, set(configuration.log_followers)
        connected = self._wanted.intersection(self._connections.nodes())  # others would miss how it begins
        self._log_followers &= connected
        for node in connected - self._log_followers:
            self._log_followers.add(node)
            server, term = self._leader.server, self._leadership.agent.term
            self.send(node, peers.LogState(term, server.entries, server.now(), typed.plain(server.state)))

    def seen(self) -> Mapping[NodeId, Seen]:
        """Return what is known of those who have been heard of."""
        return self._seen

    def is_whole(self) -> bool:
        """Tell whether every agent that counts, and has not ended, is connected."""
        agent = self._leadership.agent
        return {*agent.configuration.agents} - agent.ended - {agent.me} <= {*self._connections.nodes()}

    @property
    def term(self) -> int:
        """How often the coordinator has moved, or more."""
        return self._leadership.agent.term

    async def end(self, message: peers.End | None) -> None:
        """Tell every agent, if there is anything to tell, and hang up."""
        if self._timer is not None:
            self._timer.cancel()
        await self._connections.end(message)

    def _heartbeat(self) -> None:
        agent = self._leadership.agent
        self._timer = self._loop.call_later(agent.timeout_s / PULSES, self._heartbeat)
        self.broadcast(self._leadership.heartbeat())
        if agent.term > 0:  # those that another coordinator had taken in may not know of this one
            self._leadership.claim(but=self._connections.nodes())

    def _log(self, now: float, event: Event) -> None:
        if self._log_followers:
            entry = peers.LogEntry(self._leadership.agent.term, self._leader.server.entries, now, encode(event))
            self._connections.broadcast(entry, self._log_followers)

    # --- hearing: what the hub asks -------------------------------------------------------------------------------

    def accept(self, sock: socket.socket) -> None:
        """Serve an authenticated connection."""
        self._connections.accept(sock)

    def refusal(self, join: peers.Join | peers.Rejoin) -> str:
        """Return why a node cannot be taken in; empty if it can."""
        if isinstance(join, peers.Rejoin):
            state = self._leader.state
            lost = join.node in state.leaves and join.node not in state.nodes
            known = join.node in self._leadership.agent.configuration.agents
            return "" if known and not lost else f"node {join.node} was lost before or while the coordinator moved"
        if join.nproc_per_node != self._nproc_per_node:
            return (
                f"node {join.place.name} was started with --nproc-per-node {join.nproc_per_node}, and the job has "
                f"{self._nproc_per_node} for each node: give all of them the same"
            )
        return ""

    def joins(self, node: NodeId, join: peers.Join) -> None:
        """Take a new node in, with others that come in the same turn of the loop."""
        if not self._joining:
            self._loop.call_soon(self._take_in)
        self._joining[node] = join

    def _take_in(self) -> None:
        if len(self._leadership.agent.configurations) > 1:
            return  # `share` comes back to it
        joining = {node: join for node, join in self._joining.items() if self._connections.admit(node)}
        self._joining.clear()
        for node, join in joining.items():
            for message in self._leader.welcome(node):
                self.send(node, message)
            self._leadership.know(peers.Peer(node, join.place.address, join.place.port))
        if joining:
            self._leadership.hear(electorate.AgentsJoined(tuple(joining)))
        for node, join in joining.items():
            self._leader.submit(NodeJoined(node, join.place))

    def rejoined(self, rejoin: peers.Rejoin) -> None:
        """Go on with a node that the last coordinator took in."""
        found = decode_event(rejoin.found)
        if not isinstance(found, NodeResynced) or found.node != rejoin.node:
            raise ProtocolError(f"node {rejoin.node} does not say what it has")
        self.send(rejoin.node, self._leadership.agents())
        self.send(rejoin.node, self._leader.world())
        self._leadership.know(peers.Peer(rejoin.node, rejoin.place.address, rejoin.place.port))
        if rejoin.node not in self._leader.state.leaves:  # the last coordinator took it in, and could not tell any more
            self._leader.submit(NodeJoined(rejoin.node, rejoin.place))
        self._leader.submit(found)

    def heard(self, node: NodeId, message: peers.ToHead) -> None:
        """Take in what an agent says beside facts."""
        match message:
            case peers.Safe():
                self._leader.safe(message)
            case peers.HeartbeatAck(term, sent_at, configuration):
                self._leadership.answered(electorate.HeardFromAgent(node, term, sent_at, configuration))
                self._leader.mirror(node, message.rank_entries)
                self._seen[node] = Seen(self._loop.time(), message.traffic)
            case peers.Saved() | peers.Loaded() | peers.PreemptionNotice():
                self._leader.durable_news_of(node, message)
            case peers.Ask(number, request):
                self.send(node, peers.Answer(number, dict(self._leader.request_handler.answer(request))))
            case peers.Join() | peers.Rejoin() | peers.Fact():
                pass  # the hub's own
            case _:
                assert_never(message)

    def submit(self, event: Event) -> None:
        """Take in a fact."""
        self._leader.submit(event)

    def hung_up(self, node: NodeId) -> None:
        """Note that an agent's process has ended."""
        self._leadership.hear(electorate.AgentEnded(node))
