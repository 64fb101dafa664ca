"""The leader's followers: connections, heartbeats, admission, and the log for the other voters."""

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from msgspec import Raw, structs

from deadpool_run.agent.checkpoint.leader import CheckpointLeader
from deadpool_run.agent.cluster.leadership import Leadership
from deadpool_run.agent.records import launch_identity
from deadpool_run.coordinator.log_sender import LogSender
from deadpool_run.coordinator.requests import RequestHandler
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core.events import Event, NodeJoined, NodeLost, NodesLost, Place
from deadpool_run.core.leadership import electorate, quorum
from deadpool_run.core.state import State
from deadpool_run.errors import ProtocolError
from deadpool_run.ids import NodeId, first_id
from deadpool_run.transport.connections import Connections
from deadpool_run.view.status_report import Seen
from deadpool_run.wire import peers

_TOGETHER_S, _TOGETHER_A_NODE_S = 0.02, 20e-6
"""Nodes that come within this time, or so much for each node, are counted on together: an event of the election costs that."""
HEARTBEATS = 5
"""Heartbeats per node timeout."""


class Leading(Protocol):
    """The leader, as followers need it."""

    request_handler: RequestHandler
    durable: CheckpointLeader
    server: CoordinatorServer

    @property
    def state(self) -> State:
        """The job's state, to read only."""

    def submit(self, event: Event) -> None:
        """Take in a fact."""

    def handle(self, node: NodeId, report: peers.NodeReport) -> None:
        """Handle what has happened on a node."""

    def mirror(self, node: NodeId, rank_entries: Iterable[tuple[int, ...]]) -> None:
        """Publish the status pages of another node. Raises ValueError."""

    def welcome(self, node: NodeId) -> tuple[peers.ToNode, ...]:
        """Return the first messages for a node that joins."""

    def world(self) -> peers.World:
        """Return the world as it is."""


class Followers:
    """Every node but the leader's own, in the running loop."""

    def __init__(self, leader: Leading, leadership: Leadership, launch: Mapping[str, str]) -> None:
        """`launch` is what all nodes must have been started with."""
        self._leader = leader
        self._leadership = leadership
        self._launch = launch
        self.connections = Connections(
            self, {NodeId(name) for name in (*leader.state.failure_domains, leadership.agent.me) if name}
        )
        self.log = LogSender(self.connections)
        self._joining: dict[NodeId, peers.Join] = {}
        """Nodes to admit together, in this turn of the loop."""
        self._joined: dict[NodeId, str] = {}
        """Nodes that the election does not count on yet, with their failure domains."""
        self._answered: dict[NodeId, float] = {}
        """When the newest heartbeat was sent that each node has answered."""
        self.seen: dict[NodeId, Seen] = {}
        """The last answer of each node to a heartbeat."""
        self._lost: set[NodeId] = set()
        """Nodes that were given up. The coordinator may not know yet."""
        self._losses: list[NodeLost] = []
        """Found in this turn of the loop, and not submitted yet."""
        self._when_known: list[Callable[[], None]] = []
        self._log_at: dict[NodeId, int] = {}
        """After this many messages each log follower has the log as it was when `when_known` asked last."""
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        for node, member in leader.state.nodes.items():  # the last leader knew them, and most are no voters
            leadership.know(peers.Peer(node, member.place.address, member.place.port))
        leader.server.on_entry = self._log
        self._heartbeat()

    # --- speaking -------------------------------------------------------------------------------------------------

    def share(self, agents: peers.Agents) -> None:
        """Send every node the configurations, and ask the voters at once who knows them: the next change waits for that."""
        self.connections.broadcast(agents)
        self._ask({voter for each in agents.configurations for voter in each.voters})
        self._loop.call_soon(self.decided)  # there may be a new voter, and the caller is still at work

    def _ask(self, voters: Collection[NodeId]) -> None:
        """Send these nodes a heartbeat now."""
        heartbeat = self._leadership.heartbeat()
        if heartbeat is not None:
            for node in sorted({*voters}.intersection(self.connections.nodes())):
                self._send_heartbeat(node, heartbeat)

    def when_known(self, call: Callable[[], None]) -> None:
        """Call this once a majority of the voters has the log as it is now, so that no later leader decides otherwise."""
        self._when_known.append(call)
        self._log_at.clear()
        self._loop.call_soon(self._see_who_knows)
        self._loop.call_soon(self._ask, self.voters)

    def _see_who_knows(self) -> None:
        if not self._when_known:
            return
        self.log.flush()
        for node in self.log.followers:
            self._log_at.setdefault(node, self.connections.sent(node))
        agent = self._leadership.agent
        known = {node for node, count in self._log_at.items() if self.connections.has_received(node, count)}
        if agent.role is electorate.ElectionRole.LEADER and quorum.have_majorities(agent, {agent.me, *known}):
            calls, self._when_known = self._when_known, []
            for call in calls:
                call()

    def lose(self, node: NodeId, reason: str) -> None:
        """Close a node's connection and submit its loss, together with all losses of this turn of the loop.

        Where a switch breaks, many connections end at once; each loss alone would be a repair of its own.
        """
        self.connections.evict(node, reason)
        self._lost.add(node)
        self._joined.pop(node, None)
        self.log.followers.discard(node)
        self._answered.pop(node, None)
        self.seen.pop(node, None)
        self._leader.durable.node_lost(node)
        if not self._losses:
            self._loop.call_soon(self._submit_losses)
        self._losses.append(NodeLost(node, reason))

    def _submit_losses(self) -> None:
        losses, self._losses = tuple(self._losses), []
        self._leader.submit(losses[0] if len(losses) == 1 else NodesLost(losses))

    def decided(self) -> None:
        """Send the state to nodes that newly follow the log."""
        if self._leader.state.move is not None:
            return  # deferred facts are not in the log; a decision follows the move
        nodes = self.connections.nodes()  # the others would miss the beginning
        connected = {voter for voter in self._leadership.agent.configuration.voters if voter in nodes}
        self.log.followers &= connected
        for node in sorted(connected - self.log.followers):
            server = self._leader.server
            self.log.begin(node, self.term, server.entries, server.now(), server.state)

    def is_whole(self) -> bool:
        """Return whether every node that the leader counts on is connected."""
        agent = self._leadership.agent
        return {*self._leader.state.nodes, *agent.answered_at} - agent.ended - {agent.me} <= {*self.connections.nodes()}

    @property
    def term(self) -> int:
        """The leader's term."""
        return self._leadership.agent.term

    @property
    def founded(self) -> int:
        """The term in which the job began."""
        return self._leader.state.founded

    @property
    def voters(self) -> tuple[NodeId, ...]:
        """The nodes that elect a leader."""
        return self._leadership.agent.configuration.voters

    async def end(self, message: peers.End | None) -> None:
        """Send a last message, if there is one, until each node has confirmed it; then close all connections.

        A node that is silent for its timeout is not waited for: it may have failed just before.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._when_known.clear()
        self.log.flush()
        await self.connections.end(message, self._leadership.agent.timeout_s)

    def _heartbeat(self) -> None:
        agent = self._leadership.agent
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(agent.timeout_s / HEARTBEATS, self._heartbeat)
        heartbeat = self._leadership.heartbeat()
        if heartbeat is None:
            return
        for node in self.connections.nodes():
            self._send_heartbeat(node, heartbeat)
        if agent.term > 0:  # nodes that the last leader admitted may not know this one
            nodes = self.connections.nodes()
            self._leadership.claim(node for node in self._leader.state.nodes if node not in nodes)
        if self._joining:
            self._admit_joining()
        self._see_who_knows()

    def _send_heartbeat(self, node: NodeId, heartbeat: peers.Heartbeat) -> None:
        """Send the heartbeat, with the newest one that the node has answered."""
        own = structs.replace(heartbeat, answered=self._answered.get(node), received=self.connections.received(node))
        self.connections.send_heartbeat(node, peers.encode(own))

    def _log(self, now: float, event: Event) -> None:
        self.log.log(self.term, self._leader.server.entries, now, event)

    # --- receiving: what the connections ask ----------------------------------------------------------------------

    def agents(self) -> peers.Agents:
        """Return the configurations that count, with addresses."""
        return self._leadership.agents()

    def refusal(self, join: peers.Join | peers.Rejoin) -> str:
        """Return why a node is refused; empty if it is not."""
        if isinstance(join, peers.Rejoin):
            state = self._leader.state
            first = first_id(join.place.name, state.founded)
            if join.node != first and not join.node.startswith(f"{first}~"):
                return f"node {join.node} was in this run before it was founded again"
            lost = join.node in self._lost or (join.node in state.failure_domains and join.node not in state.nodes)
            return f"node {join.node} was lost before the new leader took over" if lost else ""
        return launch_identity.difference(join.place.name, join.launch, self._launch)

    def joins(self, node: NodeId, join: peers.Join) -> None:
        """Admit a new node, together with others that join in the same turn of the loop."""
        if not self._joining:
            self._loop.call_soon(self._admit_joining)  # and again at each heartbeat
        self._joining[node] = join

    def _admit_joining(self) -> None:
        """Admit nodes while no other leader can be elected: it would know neither them nor their ids. Else they wait."""
        if not self._leadership.holds_lease():
            return
        joining = {node: join for node, join in self._joining.items() if self.connections.admit(node)}
        self._joining.clear()
        for node in joining:
            for message in self._leader.welcome(node):
                self.connections.send(node, message)
            self.connections.send(node, self._leadership.agents())
        for node, join in joining.items():
            self._join(node, join.place)
            self._leader.submit(NodeJoined(node, join.place))

    def rejoined(self, rejoin: peers.Rejoin) -> None:
        """Admit a node of the last leader's."""
        if rejoin.found.node != rejoin.node:
            raise ProtocolError(f"node {rejoin.node} rejoins without its inventory")
        self.log.followers.discard(rejoin.node)
        self._log_at.pop(rejoin.node, None)  # it counted messages of an earlier session
        self._loop.call_soon(self.decided)  # nothing more may be decided: the job may be over
        self.connections.send(rejoin.node, self._leadership.agents())
        self.connections.send(rejoin.node, self._leader.world())
        self._join(rejoin.node, rejoin.place)
        if (
            rejoin.node not in self._leader.state.failure_domains
        ):  # the last leader failed before it could log its admission
            self._leader.submit(NodeJoined(rejoin.node, rejoin.place))
        self._leader.submit(rejoin.found)

    def _join(self, node: NodeId, place: Place) -> None:
        """Count on a node, from a moment later on: it may vote."""
        self._leadership.know(peers.Peer(node, place.address, place.port))
        if not self._joined:
            together_s = max(_TOGETHER_S, _TOGETHER_A_NODE_S * len(self._leader.state.nodes))
            self._loop.call_later(together_s, self._count_on_joined)
        self._joined[node] = place.failure_domain

    def _count_on_joined(self) -> None:
        joined, self._joined = self._joined, {}
        self._leadership.handle(electorate.AgentsJoined(joined))

    def handle(self, node: NodeId, message: peers.ToLeader) -> None:
        """Handle a message of an agent that is admitted."""
        match message:
            case peers.Fact():  # most are
                self._report(node, message)
            case peers.HeartbeatAck(term, sent_at, configuration):
                self._leadership.answered(electorate.HeardFromAgent(node, term, sent_at, configuration))
                self.connections.confirmed(node, message.received)
                self._see_who_knows()
                self._note_answer(node, sent_at)
                self._mirror(node, message.rank_entries)
                self.seen[node] = Seen(self._loop.time(), message.traffic)
            case peers.Ask(number, request):
                self._leader.request_handler.answer_later(
                    request, lambda answer: self.connections.send(node, peers.Answer(number, Raw(answer)))
                )
            case peers.Join() | peers.Rejoin() | peers.ResumeLink() | peers.EndConfirmed():
                pass  # handled by the connections
            case _:
                self._report(node, message)

    def _report(self, node: NodeId, report: peers.NodeReport) -> None:
        if self._timer is not None and self._loop.time() > self._timer.when():
            self._heartbeat()  # first, as it is due: the reports of one turn of the loop may take long
        self._leader.handle(node, report)

    def _mirror(self, node: NodeId, rank_entries: Iterable[tuple[int, ...]]) -> None:
        try:
            self._leader.mirror(node, rank_entries)
        except ValueError as error:
            raise ProtocolError(f"no rank entry: {error}") from error

    def _note_answer(self, node: NodeId, sent_at: float) -> None:
        """Note the node's answer. After its first one it hears of that at once: until then its workers may be stopped."""
        first = node not in self._answered
        self._answered[node] = max(sent_at, self._answered.get(node, sent_at))
        heartbeat = self._leadership.heartbeat() if first else None
        if heartbeat is not None:
            self._send_heartbeat(node, heartbeat)

    def hung_up(self, node: NodeId) -> None:
        """Handle the end of a connection: if there is no other, its agent may have ended."""
        self._leadership.suspect(node)
