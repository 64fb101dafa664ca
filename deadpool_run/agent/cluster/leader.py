"""The leader: the agent that runs the coordinator, and sends its orders to the nodes.

On one machine orders are plain calls of the only node; on several they also go to each follower's connection.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, assert_never

from deadpool_run.agent.checkpoint.leader import EXIT_QUEUE_AGAIN, CheckpointLeader
from deadpool_run.agent.cluster.followers import Followers
from deadpool_run.agent.cluster.orders import carry_out
from deadpool_run.agent.cluster.tracking import Tracking
from deadpool_run.agent.console import tell
from deadpool_run.agent.node.hang_detector import HangDetector, sights_of, slowed_workers
from deadpool_run.agent.node.node import LocalNode
from deadpool_run.agent.observers.observers import Observers
from deadpool_run.agent.processes.forkserver import ForkServer
from deadpool_run.agent.processes.store import Store
from deadpool_run.agent.records.logs import Logs
from deadpool_run.agent.records.run_record import RunRecord
from deadpool_run.agent.spec import LaunchSpec
from deadpool_run.coordinator.address import JOURNAL_NAME
from deadpool_run.coordinator.journal import Journal
from deadpool_run.coordinator.log_follower import FollowedLog
from deadpool_run.coordinator.requests import RequestHandler
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core import effects as do
from deadpool_run.core.copies import buddies
from deadpool_run.core.effects import Effect
from deadpool_run.core.events import CaptureSkipped, Event, SnapshotCommitted, StopRequested
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.ids import NodeId, Rank, Version, WorkerId
from deadpool_run.view.plan import plan_lines
from deadpool_run.view.status_report import NodeReports, Seen, status_object
from deadpool_run.wire import peers
from deadpool_run.wire.stores import CallersIdentified, IdentifyCallers

_EXIT_LAUNCH_FAILED = 1
_MOVED_IN = frozenset({JobPhase.SETTING_UP, JobPhase.RUNNING, JobPhase.FINISHING})


class Leader:
    """The coordinator of a job, in the running loop. `on_over` takes the exit code and the reason."""

    def __init__(  # noqa: PLR0913 - the parts of an agent that it acts on
        self,
        spec: LaunchSpec,
        node: LocalNode,
        *,
        forkserver: ForkServer,
        output: Logs,
        on_over: Callable[[int, str], None],
        on_lost: Callable[[str], None],
        on_news: Callable[[], None],
        may_decide: Callable[[], bool] = lambda: True,
        known: FollowedLog | None = None,
        term: int = 0,
    ) -> None:
        """Start a job, or continue in a later `term` from the followed log of the last leader.

        `on_lost` is called with the reason when no store can be had, `on_news` after each decision, for viewers. While it
        may not decide, events wait.
        """
        self.node = node
        """The leader's own."""
        self._spec, self._output = spec, output
        self.here = node.here.node
        self.alone = spec.cluster is None
        """Whether there is no other node."""
        self._on_over, self._on_news, self._over = on_over, on_news, False
        self._plan_printed = known is not None or self.alone
        """The plan has been printed, or need not be."""
        self._timeline = 0
        self._ranks_moved = False
        self._store = Store(forkserver, on_lost, node.here.address, self._identify)
        self._journal = Journal(
            spec.run_dir / JOURNAL_NAME,
            spec.settings,
            None if known is None else known.state,
            term=term,
            on_fault=lambda error: tell(f"the journal ends here: {error} (the job continues)"),
        )
        self.request_handler = RequestHandler(spec.settings.world_size, self, finds_hangs=spec.hang_timeout_s > 0)
        self.server = CoordinatorServer(
            spec.settings, self.perform, self._journal, self._decided, known, may_decide=may_decide
        )
        self._tracking = None if self.alone else Tracking(spec.settings.world_size)
        self.followers: Followers | None = None
        """The other nodes; None on one machine. Set before `begin`."""
        self.durable = CheckpointLeader(
            spec.durable,
            run=spec.run_id,
            checkpointers=node.checkpointers,
            vault=node.vault,
            job=self,
            newest=node.newest_durable,
        )
        self._hang_detector: HangDetector | None = None
        self._record = RunRecord(spec, output.root, term=term)
        self._observers = Observers(spec, output, self, forkserver, was_led=known is not None)

    @property
    def state(self) -> State:
        """To read, never to change."""
        return self.server.state

    def begin(self) -> None:
        """Watch for hung ranks, and begin what accompanies the job."""
        self._observers.begin()
        self._hang_detector = HangDetector(
            self._spec.hang_timeout_s,
            look=lambda: () if self.node.suspended else sights_of(self.state, self.node.vault.status_page),
            pid=self.node.workforce.pid,
            submit=self.submit,
            print_line=tell,
            protected=lambda: self.state.phase is JobPhase.RUNNING,
            slowed=lambda: slowed_workers(self.state, self.server.now()),
        )

    # --- facts ----------------------------------------------------------------------------------------------------

    def submit(self, event: Event) -> None:
        """Submit a fact, unless the job is over."""
        if self._over:
            if isinstance(event, StopRequested):
                self.durable.close()
            return
        if isinstance(event, CaptureSkipped) and self._tracking is not None:
            member = self.state.members.get(event.worker)
            if member is not None and member.rank is not None:
                self._tracking.commits.skipped(member.rank, event.version)
                self._publish_committed()
        self.server.submit(event)

    def report(self, report: peers.NodeReport) -> None:
        """Handle what has happened on the own node."""
        self.handle(self.here, report)

    def handle(self, node: NodeId, report: peers.NodeReport) -> None:
        """Handle what has happened on a node."""
        match report:
            case peers.Fact(event):
                self.submit(event)
            case peers.Safe():
                self._safe(node, report)
            case peers.Saved():
                self.durable.saved(node, report)
            case peers.Loaded():
                self.durable.loaded(node, report)
            case peers.PreemptionNotice():
                self.durable.preemption_notice()
            case CallersIdentified():
                self._store.identified(report)
            case _:
                assert_never(report)

    def _safe(self, node: NodeId, safe: peers.Safe) -> None:
        """Count which copies of a rank other nodes hold."""
        assert self._tracking is not None
        if not self._tracking.is_current(self.state, node, safe):
            return
        commits = self._tracking.commits
        commits.safe(
            Rank(safe.rank), tuple(Version(version) for version in safe.versions), safe.transcript, safe.timeline
        )
        self._publish_committed()
        if not commits.protected or commits.committed is None:
            return
        moved = self.state.former_buddies and self.state.phase in _MOVED_IN
        if self._tracking.is_news_of_protection() or moved or buddies.is_exposed(self._spec.settings, self.state):
            self.submit(SnapshotCommitted(commits.committed, self.state.epoch))
            if moved:
                self._publish_buddies()

    def tell_node(self, node: NodeId, message: peers.ToNode) -> None:
        """Send a message to a node, the own one included."""
        if node == self.here:
            carry_out(self.node, message)
        elif self.followers is not None:
            self.followers.connections.send(node, message)

    def tell_all(self, message: peers.ToNode) -> None:
        """Send a message to every node."""
        carry_out(self.node, message)
        if self.followers is not None:
            self.followers.connections.broadcast(message)

    def print_line(self, line: str) -> None:
        """Print a line for the user."""
        tell(line)

    def cannot_begin(self, why: str) -> None:
        """End the job: it cannot begin from the checkpoint that it was given."""
        tell(why)
        self._on_over(_EXIT_LAUNCH_FAILED, why)

    def leave(self) -> None:
        """End the job after a preemption notice: its state is saved."""
        self.submit(StopRequested(0, EXIT_QUEUE_AGAIN))

    def mirror(self, node: NodeId, rank_entries: Iterable[tuple[int, ...]]) -> None:
        """Copy a node's rank entries to the leader's status page.

        Except of a rank whose last owner's slots are still here: its replacement needs to know what is in them.
        """
        for rank, *words in rank_entries:
            owner = self.state.seats[rank].node if 0 <= rank < len(self.state.seats) else None
            if owner == node and not self.node.vault.lives_here(Rank(rank)):
                self.node.vault.status_page.rank_entries[rank].mirror(words)

    def welcome(self, node: NodeId) -> tuple[peers.ToNode, ...]:
        """Return the first messages for a node that joins."""
        begin = do.BeginGeneration(self.state.generation)
        run_name = (self._spec.base_dir or self._spec.run_dir).name
        joined = peers.Joined(node, self._spec.run_id, run_name, self._spec.settings, self._spec.durable)
        committed = None if self._tracking is None else self._tracking.committed
        known = tuple(message for message in (committed, self.durable.newest) if message is not None)
        return joined, self.world(), peers.Order(begin, self.state.capture_interval), *known

    # --- orders ---------------------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:  # noqa: C901, PLR0912 - one case for each kind of order
        """Pass one order to the nodes that it concerns."""
        match effect:
            case do.AbortStep() | do.AttachGroups():  # one for every rank
                self._to_worker(effect)
            case do.ReportIncident() | do.Announce():
                self._observers.report(effect)
            case do.StopJob(exit_code, reason):
                self._over = True
                self._when_known(lambda: self._on_over(exit_code, reason))
            case do.BeginGeneration():
                self._begin(effect)
            case do.DiscardAbove(epoch, version):
                if epoch > self._timeline:
                    self._new_timeline(epoch, version)
                self.tell_all(peers.Order(effect, self.state.capture_interval))  # the last leader's may have been lost
                self._publish_committed()  # after the order: a node takes no news of a timeline that it does not know
            case do.KillAgent(node):
                self._when_known(lambda: self._to(node, effect))
            case do.ReleaseNode(node) if node == self.here:
                self._on_over(0, peers.DRAINED)
            case do.ReleaseNode(node):
                self.tell_node(node, peers.End(0, peers.DRAINED))
            case do.SetBuddies():
                self._ranks_moved = True
            case do.StartWorker(_, node) | do.ReportReplicas(node):
                self._to(node, effect)
            case do.AssignRank():
                self._store.when_fresh(lambda: self._assign(effect))
                self._ranks_moved = True
            case do.ResumeFrom(source=source) | do.PrepareSpare(transcript_from=source):
                self._to_worker(effect, source)
            case _:
                self._to_worker(effect)

    def _when_known(self, call: Callable[[], None]) -> None:
        """Call this as soon as a later leader would not decide otherwise."""
        if self.followers is None:
            call()
        else:
            self.followers.when_known(call)

    def _begin(self, order: do.BeginGeneration) -> None:
        if order.generation > 0:
            self._store.renew()
        self._new_timeline(self.state.epoch, None)
        self.tell_all(peers.Order(order, self.state.capture_interval))
        self.durable.begin()

    def _assign(self, order: do.AssignRank) -> None:
        member = self.state.members.get(order.worker)
        if member is not None and not order.replacement:
            self.durable.seat(member.node, order.rank, lambda: self._to_worker(order))
        else:
            self._to_worker(order, order.transcript_from)

    def _to_worker(self, effect: Any, source: NodeId | None = None) -> None:
        member = self.state.members.get(effect.worker)
        if member is not None:
            self._to(member.node, effect, source)

    def _to(self, node: NodeId, effect: Effect, source: NodeId | None = None) -> None:
        peer = None if source is None else self._peer(source)
        if source is not None and peer is None:
            return  # its loss is the next fact, and another order follows
        self.tell_node(node, peers.Order(effect, self.state.capture_interval, peer))

    def _peer(self, node: NodeId) -> peers.Peer | None:
        found = self.state.nodes.get(node)
        return None if found is None else peers.Peer(node, found.place.address, found.place.port)

    def _identify(self, asked: IdentifyCallers) -> None:
        """Ask the machines from which the store was called. The own one answers for callers from elsewhere: not known."""
        nodes = {member.place.address: node for node, member in self.state.nodes.items()}
        if self.followers is not None:
            nodes |= self.followers.connections.addresses()
        for address, callers in asked.by_address():
            self.tell_node(nodes.get(address, self.here), callers)

    # --- what every node knows ------------------------------------------------------------------------------------

    def world(self) -> peers.World:
        """Return the world that assignments refer to."""
        return peers.World(self.state.generation, self._timeline, self._store.host, self._store.port)

    def resume(self) -> None:
        """Adopt the own node's view of the world; only the store is a new one."""
        self._timeline = self.node.timeline
        self.node.set_world(self.world())

    def _new_timeline(self, timeline: int, rollback: Version | None) -> None:
        """Restart counting what is safe: earlier reports are of a timeline that was abandoned."""
        self._timeline = timeline
        self.tell_all(self.world())
        self.durable.new_timeline()
        if self._tracking is not None:
            self._tracking.new_timeline(self._timeline, rollback)

    def _publish_committed(self) -> None:
        if self._tracking is not None and (committed := self._tracking.committed_news(self._timeline)) is not None:
            self.tell_all(committed)

    def _publish_buddies(self) -> None:
        """Send buddies to the nodes for which they changed; after a takeover, to all, once they are connected."""
        if self._tracking is None or self.state.move is not None:
            return
        for node, news in self._tracking.buddies_news(self.state, self._peer):
            self.tell_node(node, news)

    # --- what there is to see -------------------------------------------------------------------------------------

    def status(self) -> Mapping[str, Any]:
        """Return what viewers see."""
        output, now, page = self._output, self.server.now(), self.node.vault.status_page
        lines = {"console": output.console.dropped, "logs": output.dropped, "journal": self._journal.dropped}
        parts, durable = self._record.parts, self.durable.report()
        status = status_object(self.state, page, parts, durable, self._nodes(), dropped=lines, now=now)
        return self._observers.seen_by_viewers(status)

    def _nodes(self) -> NodeReports | None:
        if self.followers is None:
            return None
        seen = {**self.followers.seen, self.here: Seen(None, self.node.traffic())}
        now = asyncio.get_running_loop().time()
        return NodeReports(self.here, self.followers.term, self.followers.voters, seen, now, self.server.now())

    def holder(self, rank: Rank) -> tuple[WorkerId, int] | None:
        """Return the worker that holds the rank, with its pid."""
        owner = self.state.owner(rank)
        return None if owner is None or owner.pid is None else (owner.worker, owner.pid)

    def _decided(self) -> None:
        if self._ranks_moved and self.state.phase in _MOVED_IN:  # during a repair former copies are still needed
            self._ranks_moved = False
            self._publish_buddies()
        if self.followers is not None:
            self.followers.decided()
        self.durable.decided()
        if self.state.phase is JobPhase.SETTING_UP and not self._plan_printed:
            self._plan_printed = True
            for line in plan_lines(self._spec.settings, tuple(self.state.nodes.values())):
                tell(line)
        if self.state.phase is JobPhase.RUNNING:
            self._observers.protected()
        self._on_news()

    # --- the end --------------------------------------------------------------------------------------------------

    def retire(self) -> None:
        """Stop deciding."""
        self._over = True
        self.durable.close()

    async def end(self, message: peers.End | None) -> None:
        """Stop deciding, and send everyone this message. Without one the others elect another leader."""
        if message is not None:
            self._observers.ended(message.exit_code, message.reason)
        self._observers.close(wait=message is not None)
        self.retire()
        if self._hang_detector is not None:
            self._hang_detector.close()
        self.server.close()
        self.request_handler.close()
        if self.followers is not None:
            await self.followers.end(message)
        self._store.close()

    async def resign(self) -> None:
        """Leave the lead to another agent, which this node follows."""
        await self.end(None)
        self._journal.close(0.0)  # its thread writes what is left
        self._record.leave()

    def close(self, exit_code: int, reason: str, *, over: bool = True) -> None:
        """Complete the records; the last call."""
        self._journal.close()
        self._record.end(exit_code, reason, over=over)
