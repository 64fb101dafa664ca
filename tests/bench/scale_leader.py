"""The coordinator's agent of the scale benchmark: what `agent.leader` and `agent.followers` do with decisions, without sockets.

Real are `CoordinatorServer`, `Journal`, `Tracking`, the status page and all that becomes bytes. Not here is `core.election`,
which is measured by itself.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from deadpool_run.agent.cluster.tracking import Tracking
from deadpool_run.coordinator.journal import Journal
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.copies import buddies
from deadpool_run.core.effects import Effect
from deadpool_run.core.settings import Settings
from deadpool_run.core.state import State
from deadpool_run.core.transitions import JobPhase
from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.vault.status_page import StatusPage, create_status_page
from deadpool_run.wire import peers
from deadpool_run.wire.frames import Frames

LOG_FOLLOWERS = 2
"""Agents that follow the log of decisions, so that one of them can take over."""
_STORE = ("10.0.0.1", 29500)
_COPIED_IN = frozenset({JobPhase.UNPROTECTED, JobPhase.RUNNING, JobPhase.FINISHING})


class Leader:
    """Takes bytes in, and puts bytes out: `out` is what goes to which node."""

    def __init__(self, settings: Settings, journal: Path) -> None:
        self.out: deque[tuple[NodeId, bytes]] = deque()
        self.said: Counter[str] = Counter()
        self.spent_s = 0.0
        """CPU seconds."""
        self.logged_bytes = 0
        """What went to the log followers, who are not simulated."""
        self._settings = settings
        self._timeline = 0
        self._frames: dict[NodeId, Frames] = {}
        self._tracking = Tracking(settings.world_size)
        self._status_page = StatusPage(create_status_page(settings.world_size), settings.world_size)
        self._server = CoordinatorServer(settings, self.perform, Journal(journal, settings), self._decided)
        self._server.on_entry = self._log
        self._moved = False

    @property
    def state(self) -> State:
        """The coordinator's."""
        return self._server.state

    def timed(self, act: Callable[[], object]) -> float:
        """Do something of the coordinator's and return what it took, in CPU seconds."""
        began = time.thread_time()
        act()
        took = time.thread_time() - began
        self.spent_s += took
        return took

    # --- what comes -----------------------------------------------------------------------------------------------

    def feed(self, node: NodeId, data: bytes) -> None:
        """Take in bytes of a node's connection."""
        for body in self._frames.setdefault(node, Frames(peers.MAX_FRAME_BYTES)).feed(data):
            message = peers.decode(body)
            self.said[type(message).__name__] += 1
            match message:
                case peers.Fact(event):
                    self._server.submit(event)
                case peers.Safe():
                    self._safe(message)
                case peers.HeartbeatAck(rank_entries=rank_entries):
                    self._mirror(node, rank_entries)
                case peers.Join(place):
                    self._join(NodeId(place.name), place)
                case _:
                    raise AssertionError(message)

    def submit(self, event: ev.Event) -> None:
        """Take in a fact of our own."""
        self._server.submit(event)

    def _join(self, node: NodeId, place: ev.Place) -> None:
        begin = do.BeginGeneration(self.state.generation)
        self._tell([node], peers.Joined(node, "id", "name", self._settings, None))
        self._tell([node], self._world())
        self._tell([node], peers.Order(begin, self.state.capture_interval))
        self._server.submit(ev.NodeJoined(node, place))

    def _safe(self, told: peers.Safe) -> None:
        commits = self._tracking.commits
        commits.safe(Rank(told.rank), tuple(map(Version, told.versions)), told.transcript, told.timeline)
        self._publish_committed()
        if not commits.protected or commits.committed is None:
            return
        if self._tracking.is_news_of_protection() or buddies.is_exposed(self._settings, self.state):
            self._server.submit(ev.SnapshotCommitted(commits.committed, self.state.epoch))

    def _mirror(self, node: NodeId, rank_entries: Collection[tuple[int, ...]]) -> None:
        for rank, *words in rank_entries:
            if 0 <= rank < len(self.state.seats) and self.state.seats[rank].node == node:
                self._status_page.rank_entries[rank].mirror(words)

    # --- what goes ------------------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        """Say an order to whom it concerns."""
        match effect:
            case do.ReportIncident() | do.Announce() | do.StopJob():
                pass
            case do.BeginGeneration():
                self._new_timeline(None)
                self._to_all(effect)
            case do.DiscardAbove(_, version):
                self._new_timeline(version)
                self._to_all(effect)
            case do.SetBuddies():
                self._moved = True
            case do.StartWorker(_, node) | do.ReportReplicas(node):
                self._to(node, effect, None)
            case do.AssignRank(transcript_from=source):
                self._to_worker(effect, source)
                self._moved = True
            case do.ResumeFrom(source=source):
                self._to_worker(effect, source)
            case _:
                self._to_worker(effect, None)

    def _to_worker(self, effect: Any, source: NodeId | None) -> None:
        member = self.state.members.get(effect.worker)
        if member is not None:
            self._to(member.node, effect, source)

    def _to(self, node: NodeId, effect: Effect, source: NodeId | None) -> None:
        peer = None if source is None else self._peer(source)
        self._tell([node], peers.Order(effect, self.state.capture_interval, peer))

    def _to_all(self, effect: Effect) -> None:
        self._tell(self.state.nodes, peers.Order(effect, self.state.capture_interval))

    def _tell(self, to: Collection[NodeId], message: peers.Message) -> None:
        data = peers.encode(message)
        self.out.extend((node, data) for node in to)

    def _log(self, now: float, event: ev.Event) -> None:
        entry = peers.encode(peers.LogEntry(0, self._server.entries, now, event))
        self.logged_bytes += LOG_FOLLOWERS * len(entry)

    def _peer(self, node: NodeId) -> peers.Peer | None:
        found = self.state.nodes.get(node)
        return None if found is None else peers.Peer(node, found.place.address, found.place.port)

    def _world(self) -> peers.World:
        return peers.World(self.state.generation, self._timeline, *_STORE)

    def _new_timeline(self, rollback: Version | None) -> None:
        self._timeline = self.state.epoch
        self._tell(self.state.nodes, self._world())
        self._tracking.new_timeline(self._timeline, rollback)
        self._publish_committed()

    def _publish_committed(self) -> None:
        if (told := self._tracking.committed_news(self._timeline)) is not None:
            self._tell(self.state.nodes, told)

    def _decided(self) -> None:
        if self._moved and self.state.phase in _COPIED_IN:
            self._moved = False
            for node, told in self._tracking.buddies_news(self.state, self._peer):
                self._tell([node], told)
