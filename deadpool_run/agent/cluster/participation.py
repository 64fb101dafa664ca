"""One membership of this node in a job over several nodes: as follower, as leader, or first one and then the other.

The node and its workers stay when the leader changes: only what is above them is replaced.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from deadpool_run.agent.cluster.advertisement import Advertisement
from deadpool_run.agent.cluster.follower import Follower, LostError, NoLeader
from deadpool_run.agent.cluster.followers import Followers
from deadpool_run.agent.cluster.leader import Leader
from deadpool_run.agent.cluster.leadership import Leadership
from deadpool_run.agent.cluster.orders import carry_out, heartbeat_ack
from deadpool_run.agent.console import tell
from deadpool_run.agent.node.node import LocalNode
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.records.launch_identity import identity_of
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.rendezvous import rendezvous
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.agent.tasks import Tasks
from deadpool_run.coordinator.control import ControlServer
from deadpool_run.coordinator.log_follower import LogFollower
from deadpool_run.coordinator.requests import with_node_here
from deadpool_run.coordinator.shared_status import NO_LEADER
from deadpool_run.core.events import CoordinatorMoved, Event, JobSubmitted, Place
from deadpool_run.core.leadership import election, electorate
from deadpool_run.core.leadership.electorate import ElectionRole
from deadpool_run.core.transitions import JobPhase
from deadpool_run.ids import NodeId
from deadpool_run.transport import handshake
from deadpool_run.transport.link import PeerLink
from deadpool_run.transport.link_session import LinkSession
from deadpool_run.vault.transfer.replicator import Replicator
from deadpool_run.wire import peers
from deadpool_run.wire.auth import ConnectionRole, GreetingRefusedError
from deadpool_run.wire.peer_connection import PeerConnection
from deadpool_run.wire.peers import Peer

_RETRY_S, _MAX_RETRY_S = 0.05, 0.8
"""Pause before a leader that could not be followed is dialled again; it doubles each time."""
_SILENCE = 0.5
"""A leader that was silent for this many node timeouts is dialled again: the connection may have broken unnoticed."""
_STREAMS = 4
"""Connections for large snapshots, of all ranks of a machine together."""


class Participation:
    """Made in the running loop. `over` is the end of the job, or `LostError` where it continues without this node."""

    def __init__(
        self,
        spec: LaunchSpec,
        node: NodeId,
        place: Place,
        *,
        forkserver: ForkServer,
        output: Logs,
    ) -> None:
        assert spec.cluster is not None
        self._spec, self._place = spec, place
        self._forkserver, self._output = forkserver, output
        self._credentials, self._timeout_s = spec.credentials(node), spec.settings.node_timeout_s
        self._cluster, self._here = spec.cluster, Peer(node, place.address, place.port)
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self.leader: Leader | None = None
        self._follower: Follower | None = None
        self._no_leader = NoLeader()
        self._session = LinkSession()
        """With the leader of the newest term that this node has rejoined."""
        self._control = ControlServer(spec.run_dir, self._answer)
        self._preemption_notice = False
        self._replica = LogFollower(spec.settings)
        self._callers: list[PeerConnection] = []  # nodes that came before this one knew that it leads
        self._tasks = Tasks(self._failed)
        self.leadership: Leadership
        self.advertisement = Advertisement(spec, self._here, self.fence)
        self.node = LocalNode(spec, self._here, forkserver=forkserver, output=output, above=self._no_leader)
        self._replicator = Replicator(
            self.node.vault,
            self._loop,
            lambda address, port: rendezvous.dial(ConnectionRole.VAULT, address, port, self._credentials),
            self.node.replicated,
            self.node.refused,
            here=self._here,
            secret=spec.cluster.token,
            bandwidth=spec.cluster.bandwidth,
            streams=spec.cluster.streams or max(1, _STREAMS // spec.nproc_per_node),
        )
        self.node.copies = self._replicator

    # --- how it begins --------------------------------------------------------------------------------------------

    async def found(self, term: int) -> None:
        """Lead a new job, from this term on."""
        here, now = self._here.node, self._loop.time()
        domain, claims = self._place.failure_domain, self._cluster.authority is not None
        agent = election.first_leader(here, self._timeout_s, now, domain, term, claims=claims)
        self.leadership = Leadership(agent, [self._here], self, self._cluster, self._credentials)
        leader = self._lead(term)
        leader.begin()
        leader.submit(JobSubmitted(here, self._place, term))
        self.advertisement.lead(leader, term)
        await self._control.start()

    async def join(self, follower: Follower, agents: peers.Agents) -> None:
        """Follow the leader that has admitted this node."""
        here, asked_at, configurations = self._here.node, follower.asked_at, agents.configurations
        domain, claims = self._place.failure_domain, self._cluster.authority is not None
        agent = election.follower(here, self._timeout_s, configurations, asked_at, domain, claims=claims)
        self.leadership = Leadership(agent, [*agents.peers, self._here], self, self._cluster, self._credentials)
        self.advertisement.follow(self._output)
        self._attach(follower)
        self._keep_connected(follower, self.leadership.leader, agent.term)
        await self._control.start()

    def accept(self, purpose: ConnectionRole, connection: PeerConnection) -> None:
        """Serve another agent's authenticated connection."""
        role = self.leadership.agent.role
        if purpose is ConnectionRole.VAULT:
            self._replicator.serve(connection)
        elif purpose is ConnectionRole.VOTE:
            self.leadership.vote_links.accept(connection)
        elif role is ElectionRole.LEADER and self.leader is not None and self.leader.followers is not None:
            self.leader.followers.connections.accept(connection)
        elif role is ElectionRole.ELECTED:
            self._callers.append(connection)
        else:
            self._redirect(connection)

    def _redirect(self, connection: PeerConnection) -> None:
        """Redirect a node that wants to join to the leader, if that is known."""
        leader = self.leadership.leader
        link = PeerLink(connection, lambda _: None)
        if leader is not None and leader.node != self._here.node:
            link.send(peers.Redirect(leader, self.leadership.agents()))
        link.close_when_flushed()

    def request(self, event: Event) -> None:
        """Pass a user's request to the leader; keep it while it is uncertain who leads."""
        unsure = self.leader is None and (self._follower is None or not self._follower.was_answered)
        (self._no_leader if unsure else self.node.above).report(peers.Fact(event))

    async def _answer(self, request: Mapping[str, Any]) -> bytes:
        """Answer a viewer of this node, as the leader would."""
        request = with_node_here(request, self._here.node)
        if self.leader is not None and self.leadership.holds_lease():
            return await self.leader.request_handler.encoded(request)
        if self._follower is not None:
            return await self._follower.ask(request)
        return NO_LEADER

    def preemption_notice(self) -> None:
        """Pass a preemption notice to the leader, and to each later one."""
        self._preemption_notice = True
        self._send_preemption_notice()

    # --- leading: what the election orders ------------------------------------------------------------------------

    def take_over(self, term: int) -> None:
        """Lead from now on: from the followed log of the last leader, or from the own one if nobody has led since."""
        leader, again = self.leader, self.leader is not None
        if leader is not None:
            leader.durable.led_again()
            leader.server.resume()
        elif self._replica.known is None:
            self.fence("elected leader without a copy of the decision log; leaving the job")
            return
        else:
            if self._follower is not None:
                self._follower.close()
                self._follower = None
            self.node.participant.void()  # what the last leader ordered
            leader = self._lead(term)
            leader.resume()
            tell(f"this node leads the job now, in term {term}; its records are in {self._spec.run_dir}")
        has_followers = not again or self.leadership.has_followers()
        if again and has_followers:  # they follow as they would another leader
            self.share(self.leadership.agents())
        if leader.state.phase is JobPhase.STOPPED:
            self._tasks.start(self._lead_to_the_end(leader, term))
        else:
            if has_followers:
                leader.submit(CoordinatorMoved(term, self._here.node))
                leader.submit(self.node.resynced())
                self._replicator.report_all()
            if not again:
                leader.begin()
            self.advertisement.lead(leader, term)
        self._accept_callers()

    def _accept_callers(self) -> None:
        """Serve the nodes that called while it was uncertain whether this agent leads."""
        callers, self._callers = self._callers, []
        for caller in callers:
            self.accept(ConnectionRole.MEMBER, caller)

    async def _lead_to_the_end(self, leader: Leader, term: int) -> None:
        """Lead only to end the job: not every node may have been told that it is over."""
        stop, followers = leader.state.stop, leader.followers
        assert stop is not None
        assert followers is not None
        leader.durable.close()  # the last step was being written, in an earlier term: that attempt is void
        self.advertisement.lead(leader, term)
        until = self._loop.time() + self._timeout_s
        while not (followers.is_whole() or self.over.done()) and self._loop.time() < until:
            await asyncio.wait({self.over}, timeout=_RETRY_S)
        followers.when_known(lambda: self._over(stop.exit_code, stop.reason))

    def share(self, agents: peers.Agents) -> None:
        """Send every node the configuration."""
        if self.leader is not None and self.leader.followers is not None:
            self.leader.followers.share(agents)

    def lose_node(self, node: NodeId, reason: str) -> None:
        """Report to the coordinator that a node failed."""
        if self.leader is not None and self.leader.followers is not None:
            self.leader.followers.lose(node, reason)

    def _lead(self, term: int) -> Leader:
        leader = self.leader = Leader(
            self._spec,
            self.node,
            forkserver=self._forkserver,
            output=self._output,
            on_over=self._over,
            on_lost=self.fence,
            on_news=self._control.notify,
            may_decide=self.leadership.holds_lease,
            known=self._replica.known,
            term=term,
        )
        leader.followers = Followers(leader, self.leadership, identity_of(replace(self._spec, named=True)))
        self._above(leader)
        self._pass_on_requests(leader)
        return leader

    # --- following ------------------------------------------------------------------------------------------------

    def follow(self, leader: Peer, term: int) -> None:
        """Follow another leader."""
        if self.leader is not None:
            self._tasks.start(self.leader.resign())
            self.leader = None
            self.advertisement.follow(self._output)
        if self._follower is not None:
            self._follower.close()
            self._follower = None
        self.node.above, self._session = self._no_leader, LinkSession()
        self.node.participant.void()  # what the last leader ordered
        self._tasks.start(self._rejoin(leader, term))
        self._accept_callers()

    async def _rejoin(self, leader: Peer, term: int) -> None:
        """Connect to the leader of this term, until there is a newer one. The election finds out whether it lives."""
        pause_s = _RETRY_S
        while self._is_awaited(term):
            if await self._is_followed(leader, term):
                return
            await asyncio.wait({self.over}, timeout=pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)

    async def _is_followed(self, leader: Peer, term: int) -> bool:
        """Return whether the agent was connected, and answers as a leader."""
        try:
            connection = await self._dial(leader)
        except (OSError, GreetingRefusedError):
            return False
        if not self._is_awaited(term):
            connection.close()
            return False
        rejoin = peers.Rejoin(self._here.node, self._place, self.node.resynced(), self._session.count)
        follower = Follower(connection, rejoin, self._session)
        self._attach(follower)
        self._replicator.report_all()
        if await follower.answered(_SILENCE * self._timeout_s):
            self._keep_connected(follower, leader, term)
            self._pass_on_requests(follower)
            return True
        follower.close()
        if self._follower is follower:  # it does not lead yet, or no longer: it may live, and reports wait for it
            self._follower = None
        return False

    def _keep_connected(self, follower: Follower, leader: Peer | None, term: int) -> None:
        assert leader is not None
        follower.keep_connected(self._here.node, term, partial(self._dial, leader), _SILENCE * self._timeout_s)

    def _dial(self, leader: Peer) -> Awaitable[PeerConnection]:
        return handshake.connect(
            leader.address, leader.port, ConnectionRole.MEMBER, self._credentials, _SILENCE * self._timeout_s
        )

    def _is_awaited(self, term: int) -> bool:
        return not self.over.done() and self.leadership.agent.term == term and self._follower is None

    def _attach(self, follower: Follower) -> None:
        self._follower = follower
        self._above(follower)
        follower.begin(lambda message: self._handle(follower, message), lambda: self._cut(follower))

    def _above(self, above: Follower | Leader) -> None:
        self.node.above = above
        if self._preemption_notice:  # a new leader must handle its own start first
            self._loop.call_soon(self._send_preemption_notice)

    def _send_preemption_notice(self) -> None:
        self.node.above.report(peers.PreemptionNotice())

    def _pass_on_requests(self, above: Follower | Leader) -> None:
        requests, self._no_leader.requests = self._no_leader.requests, []
        for request in requests:
            above.report(request)

    def _handle(self, follower: Follower, message: peers.Message) -> None:  # noqa: C901, PLR0912 - one case for each message
        match message:
            case _ if follower is not self._follower:
                pass  # from a former leader
            case peers.Heartbeat(term):
                self.leadership.handle_heartbeat(message)
                if not election.follows(self.leadership.agent, term):
                    return
                number = self.leadership.agent.configuration.number
                follower.answer(heartbeat_ack(self.node, message, number, follower.received))
            case peers.Agents():
                self.leadership.handle_configurations(message)
            case peers.Redirect(agents=agents):
                self.leadership.handle_configurations(agents)
            case peers.LogState() | peers.LogEntries():
                if (known := self._replica.take_in(message)) is not None:
                    self.leadership.know_log(known.index)
            case peers.Evict(reason):
                why = f"the leader declared this node lost: {reason}"
                self.leadership.handle(electorate.Evicted(self.leadership.agent.term, why))
            case peers.End(exit_code, reason):
                self._over(exit_code, reason)
            case peers.Answer(number, answer):
                follower.take_answer(number, bytes(answer))
            case peers.Joined():
                pass  # handled before this membership began
            case peers.Order():
                self.leadership.catch_up()  # another node may have had the order since
                carry_out(self.node, message)
                self._control.notify()
            case _:
                carry_out(self.node, message)

    def _cut(self, follower: Follower) -> None:
        if follower is self._follower and follower.was_answered:
            self.leadership.suspect(self.leadership.agent.configuration.leader)

    # --- the end --------------------------------------------------------------------------------------------------

    def lease_changed(self, *, regained: bool) -> None:
        """Decide again, since nobody else was elected; or nothing for now, since this leader's lease has run out."""
        if self.leader is not None and regained:
            self.leader.server.resume()
        elif self.leader is not None:
            self.leader.server.hold()
            # It may be elected again, and others may know more, or less.
            self.leadership.know_log(electorate.LogIndex(self.leadership.agent.term, self.leader.server.entries))

    def fence(self, reason: str) -> None:
        """End this node's workers first of all: other nodes have their ranks, or will."""
        self.node.end_workers()
        if self.leader is not None:
            self.leader.retire()
        if not self.over.done():
            self.over.set_exception(LostError(reason))

    async def end(self, exit_code: int, reason: str, *, fenced: bool) -> None:
        """Stop leading or following. The node is closed separately."""
        await self._control.close()
        self.leadership.close()
        if self._follower is not None:
            self._follower.close()
        for caller in self._callers:
            caller.close()
        if not fenced:
            self.node.voters_are([])
        if self.leader is not None:
            # A fenced leader sends nothing: the end of its connections makes the others elect another.
            await self.leader.end(None if fenced else peers.End(exit_code, reason))
        await self._tasks.end()
        if self.over.done() and not self.over.cancelled():
            self.over.exception()  # retrieved, or asyncio warns

    def _over(self, exit_code: int, reason: str) -> None:
        if not self.over.done():
            self.over.set_result((exit_code, reason))

    def _failed(self, error: BaseException) -> None:
        if not self.over.done():
            self.over.set_exception(error)
