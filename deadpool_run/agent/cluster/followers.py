"""The other nodes of a job that is led from here: told, heard, counted, and two of them kept ready to take over."""

import asyncio
import socket
from collections.abc import Iterable, Mapping
from typing import Protocol, assert_never

from deadpool_run.agent.checkpoint.durable_head import DurableHead
from deadpool_run.agent.cluster.leadership import Authority
from deadpool_run.coordinator.connections import Hub
from deadpool_run.coordinator.requests import Desk
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

    desk: Desk
    durable: DurableHead | None

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

    def mirror(self, node: NodeId, cells: Iterable[tuple[int, ...]]) -> None:
        """Publish the status pages of another node."""

    def durable_news_of(self, node: NodeId, told: peers.Saved | peers.Loaded | peers.Foretold) -> None:
        """Take in news of a durable checkpoint."""

    def welcome(self, node: NodeId) -> tuple[peers.ToNode, ...]:
        """Return what a node that joins is told first."""

    def world(self) -> peers.World:
        """Return the world as it is."""


class Assembly:
    """Every node but our own, in the running loop."""

    def __init__(self, head: Leading, authority: Authority, nproc_per_node: int) -> None:
        self._head = head
        self._authority = authority
        self._nproc_per_node = nproc_per_node
        self._hub = Hub(self, {NodeId(name) for name in (*head.state.leaves, authority.agent.me) if name})
        self._standbys: set[NodeId] = set()
        """Those that follow the log."""
        self._roster: electorate.Roster | None = None
        self._wanted: set[NodeId] = set()
        """Those that are to, of that roster."""
        self._joining: dict[NodeId, peers.Join] = {}
        """Nodes that are to be taken in together, once a majority knows of the last change of the roster.

        Each change is told to every node, and thousands of nodes may come within seconds.
        """
        self._seen: dict[NodeId, Seen] = {}
        self._losses: list[NodeLost] = []
        """Found in this turn of the loop, and not told yet."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        head.server.on_entry = self._log
        self._pulse()

    # --- speaking -------------------------------------------------------------------------------------------------

    def send(self, node: NodeId, message: peers.ToNode) -> None:
        """Say something to a node; nothing happens if it is lost."""
        self._hub.send(node, message)

    def broadcast(self, message: peers.ToNode) -> None:
        """Say something to every node."""
        self._hub.broadcast(message)

    def share(self, agents: peers.Agents) -> None:
        """Tell every node who counts now."""
        self.broadcast(agents)
        if self._joining and len(agents.rosters) == 1:
            self._loop.call_soon(self._take_in)  # whoever says so is in the middle of it

    def lose(self, node: NodeId, reason: str) -> None:
        """Hang up on a node, and tell the coordinator: in one word of all that are lost in this turn of the loop.

        Where a switch breaks, many connections end at once; each loss alone would be a repair of its own.
        """
        self._hub.evict(node, reason)
        self._standbys.discard(node)
        self._seen.pop(node, None)
        if self._head.durable is not None:
            self._head.durable.node_lost(node)
        if not self._losses:
            self._loop.call_soon(self._tell_losses)
        self._losses.append(NodeLost(node, reason))

    def _tell_losses(self) -> None:
        losses, self._losses = tuple(self._losses), []
        self._head.submit(losses[0] if len(losses) == 1 else NodesLost(losses))

    def decided(self) -> None:
        """Bring those who are to take over up to date, if they are others than before."""
        if self._head.state.move is not None:
            return  # what is deferred is not told; there will be a decision when it is over
        roster = self._authority.agent.roster
        if roster is not self._roster:  # who is next is looked for in all of it, and decisions are many
            self._roster, self._wanted = roster, set(roster.standbys)
        connected = self._wanted.intersection(self._hub.nodes())  # others would miss how it begins
        self._standbys &= connected
        for node in connected - self._standbys:
            self._standbys.add(node)
            server, term = self._head.server, self._authority.agent.term
            self.send(node, peers.LogState(term, server.entries, server.now(), typed.plain(server.state)))

    def seen(self) -> Mapping[NodeId, Seen]:
        """Return what is known of those who have been heard of."""
        return self._seen

    def is_whole(self) -> bool:
        """Tell whether every agent that counts, and has not ended, is connected."""
        agent = self._authority.agent
        return {*agent.roster.agents} - agent.ended - {agent.me} <= {*self._hub.nodes()}

    @property
    def term(self) -> int:
        """How often the coordinator has moved, or more."""
        return self._authority.agent.term

    async def end(self, message: peers.End | None) -> None:
        """Tell every agent, if there is anything to tell, and hang up."""
        if self._timer is not None:
            self._timer.cancel()
        await self._hub.end(message)

    def _pulse(self) -> None:
        agent = self._authority.agent
        self._timer = self._loop.call_later(agent.timeout_s / PULSES, self._pulse)
        self.broadcast(self._authority.pulse())
        if agent.term > 0:  # those that another coordinator had taken in may not know of this one
            self._authority.claim(but=self._hub.nodes())

    def _log(self, now: float, event: Event) -> None:
        if self._standbys:
            entry = peers.LogEntry(self._authority.agent.term, self._head.server.entries, now, encode(event))
            self._hub.broadcast(entry, self._standbys)

    # --- hearing: what the hub asks -------------------------------------------------------------------------------

    def accept(self, sock: socket.socket) -> None:
        """Serve an authenticated connection."""
        self._hub.accept(sock)

    def refusal(self, join: peers.Join | peers.Rejoin) -> str:
        """Return why a node cannot be taken in; empty if it can."""
        if isinstance(join, peers.Rejoin):
            state = self._head.state
            lost = join.node in state.leaves and join.node not in state.nodes
            known = join.node in self._authority.agent.roster.agents
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
        if len(self._authority.agent.rosters) > 1:
            return  # `share` comes back to it
        joining = {node: join for node, join in self._joining.items() if self._hub.admit(node)}
        self._joining.clear()
        for node, join in joining.items():
            for message in self._head.welcome(node):
                self.send(node, message)
            self._authority.know(peers.Peer(node, join.place.address, join.place.port))
        if joining:
            self._authority.hear(electorate.AgentsJoined(tuple(joining)))
        for node, join in joining.items():
            self._head.submit(NodeJoined(node, join.place))

    def rejoined(self, rejoin: peers.Rejoin) -> None:
        """Go on with a node that the last coordinator took in."""
        found = decode_event(rejoin.found)
        if not isinstance(found, NodeResynced) or found.node != rejoin.node:
            raise ProtocolError(f"node {rejoin.node} does not say what it has")
        self.send(rejoin.node, self._authority.agents())
        self.send(rejoin.node, self._head.world())
        self._authority.know(peers.Peer(rejoin.node, rejoin.place.address, rejoin.place.port))
        if rejoin.node not in self._head.state.leaves:  # the last coordinator took it in, and could not tell any more
            self._head.submit(NodeJoined(rejoin.node, rejoin.place))
        self._head.submit(found)

    def heard(self, node: NodeId, message: peers.ToHead) -> None:
        """Take in what an agent says beside facts."""
        match message:
            case peers.Safe():
                self._head.safe(message)
            case peers.Beat(term, sent_at, roster):
                self._authority.answered(electorate.HeardFromAgent(node, term, sent_at, roster))
                self._head.mirror(node, message.cells)
                self._seen[node] = Seen(self._loop.time(), message.traffic)
            case peers.Saved() | peers.Loaded() | peers.Foretold():
                self._head.durable_news_of(node, message)
            case peers.Ask(number, request):
                self.send(node, peers.Answer(number, dict(self._head.desk.answer(request))))
            case peers.Join() | peers.Rejoin() | peers.Fact():
                pass  # the hub's own
            case _:
                assert_never(message)

    def submit(self, event: Event) -> None:
        """Take in a fact."""
        self._head.submit(event)

    def hung_up(self, node: NodeId) -> None:
        """Note that an agent's process has ended."""
        self._authority.hear(electorate.AgentEnded(node))
