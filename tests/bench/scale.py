"""What one coordinator costs that leads many nodes: the real one, with simulated agents, every message through the wire layer.

    python tests/bench/scale.py [--nodes 100,1000] [--ranks-per-node 8] [--json]
    python tests/bench/scale.py --nodes 10000 --ranks-per-node 1

Each number of nodes is run in a process of its own. What is real: `CoordinatorServer` (decisions), `Journal` (to a
temporary file), `Tracking` and `Commits`, `wire.peers` and `wire.facts` in both directions, frames cut from bytes. What is
simulated: the agents (they obey at once), sockets and the kernel (bytes are handed over within the process). `decide`
below is the coordinator's side alone: bytes in, decode, core, journal, encode, bytes out; the agents' side is not in it.
All times are CPU seconds of the one thread, so that a busy machine does not change them; a coordinator with a core of its
own takes as long on the clock.

* start: from the first node's arrival until every rank is protected.
* beats, snapshots: messages of a job in which nothing goes wrong. A second of it costs nodes x 5 / `--node-timeout` beats
  and, for every snapshot, a message a rank and one to every node.
* loss: from the closed connections of so many nodes at once until the bytes of the last order that follows from them
  alone (`told`), until those of the last `AttachGroups` (`repaired`), and until every rank has completed a step (`over`).
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import header, result, table

from deadpool_run.agent.tracking import Tracking
from deadpool_run.coordinator.journal import Journal
from deadpool_run.coordinator.server import CoordinatorServer
from deadpool_run.core import effects as do
from deadpool_run.core import events as ev
from deadpool_run.core.effects import Effect
from deadpool_run.core.lifecycle import JobPhase
from deadpool_run.core.settings import Settings
from deadpool_run.ids import NodeId, Rank, Version, WorkerId
from deadpool_run.vault.board import WORDS
from deadpool_run.wire import peers
from deadpool_run.wire.facts import decode_effect, decode_event, encode
from deadpool_run.wire.frames import Frames

BEATS = 5
"""Signs of life of a node in one `--node-timeout`."""
SNAPSHOTS = 3
_STORE = ("10.0.0.1", 29500)


class Desk:
    """What the coordinator's agent does with decisions, as `agent.head` does it; bytes go to `out`."""

    def __init__(self, settings: Settings, journal: Path) -> None:
        self.out: deque[tuple[NodeId, bytes]] = deque()
        self.said: Counter[str] = Counter()
        self.spent_s = 0.0
        self._life = 0
        self._frames: dict[NodeId, Frames] = {}
        self._tracking = Tracking(settings.world_size)
        self._journal = Journal(journal, settings)
        self._server = CoordinatorServer(settings, self, self._journal, self._decided)
        self._moved = False

    @property
    def state(self) -> Any:
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
                case peers.Join(place):
                    self._join(NodeId(place.name), place)
                case peers.Fact(event):
                    self._server.submit(decode_event(event))
                case peers.Safe():
                    self._safe(message)
                case _:
                    pass  # a beat: the agent mirrors its cells

    def submit(self, event: ev.Event) -> None:
        """Take in a fact of our own."""
        self._server.submit(event)

    def _join(self, node: NodeId, place: ev.Place) -> None:
        begin = do.BeginGeneration(self.state.generation)
        self._send(node, peers.Joined(node, "id", "name", {}))
        self._send(node, self._world())
        self._send(node, peers.Order(encode(begin), self.state.capture_interval))
        self._server.submit(ev.NodeJoined(node, place))

    def _safe(self, told: peers.Safe) -> None:
        commits = self._tracking.commits
        commits.safe(Rank(told.rank), tuple(map(Version, told.versions)), told.transcript, told.life)
        self._publish_committed()
        if commits.protected and self._tracking.is_news_of_protection() and commits.committed is not None:
            self._server.submit(ev.SnapshotCommitted(commits.committed, self.state.epoch))

    # --- what goes ------------------------------------------------------------------------------------------------

    def perform(self, effect: Effect) -> None:
        """Say an order to whom it concerns."""
        match effect:
            case do.ReportIncident() | do.Announce() | do.StopJob():
                pass
            case do.BeginGeneration():
                self._new_life(None)
                self._to_all(effect)
            case do.DiscardAbove(_, version):
                self._new_life(version)
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
        self._send(node, peers.Order(encode(effect), self.state.capture_interval, peer))

    def _to_all(self, effect: Effect) -> None:
        for node in self.state.nodes:
            self._to(node, effect, None)

    def _send(self, node: NodeId, message: peers.Message) -> None:
        self.out.append((node, peers.encode(message)))

    def _peer(self, node: NodeId) -> peers.Peer | None:
        found = self.state.nodes.get(node)
        return None if found is None else peers.Peer(node, found.place.address, found.place.port)

    def _world(self) -> peers.World:
        return peers.World(self.state.generation, self._life, *_STORE)

    def _new_life(self, rollback: Version | None) -> None:
        self._life = self.state.epoch
        for node in self.state.nodes:
            self._send(node, self._world())
        self._tracking.new_life(self._life, rollback)
        self._publish_committed()

    def _publish_committed(self) -> None:
        if (told := self._tracking.committed_news(self._life)) is not None:
            for node in self.state.nodes:
                self._send(node, told)

    def _decided(self) -> None:
        if not self._moved:
            return
        self._moved = False
        for node, told in self._tracking.buddies_news(self.state, self._peer):
            self._send(node, told)


class Agents:
    """Every node's agent: each order is obeyed at once, and what it says is bytes again."""

    def __init__(self) -> None:
        self.ranks: dict[WorkerId, Rank] = {}
        self.rehearsing: set[WorkerId] = set()
        self.life = 0
        self.stand = 1
        self._frames: dict[NodeId, Frames] = {}
        self._protected: set[Rank] = set()

    def hear(self, node: NodeId, data: bytes) -> Iterator[bytes]:
        """Yield what the node says to what it hears."""
        for body in self._frames.setdefault(node, Frames(peers.MAX_FRAME_BYTES)).feed(data):
            message = peers.decode(body)
            if isinstance(message, peers.World):
                self.life = message.life
            elif isinstance(message, peers.Order):
                for answer in self._obey(node, decode_effect(message.effect)):
                    yield peers.encode(peers.Fact(encode(answer)) if isinstance(answer, ev.Event) else answer)

    def _obey(self, node: NodeId, order: Effect) -> Iterator[ev.Event | peers.Safe]:
        held = (Version(self.stand - 1), Version(self.stand))
        match order:
            case do.StartWorker(worker):
                yield ev.WorkerStarted(worker, 1000 + worker)
                yield ev.WorkerReady(worker)
            case do.AssignRank(worker, rank, epoch, newcomer):
                self.ranks[worker] = rank
                if newcomer:
                    self.rehearsing.add(worker)
                    yield ev.NewcomerRehearsed(worker, epoch)
                else:
                    yield ev.ScriptInitialized(worker)
                    yield ev.TranscriptSealed(worker)
                    yield self.safe(worker)
            case do.AbortStep(worker, epoch) if worker in self.rehearsing:
                yield ev.NewcomerRehearsed(worker, epoch)
            case do.AbortStep(worker, epoch):
                yield ev.SurvivorDrained(worker, epoch, held[1], held[1], held)
            case do.ReportReplicas(_, rank, epoch):
                yield ev.ReplicasReported(node, rank, epoch, held)
            case do.ResumeFrom(worker, epoch):
                self.rehearsing.discard(worker)
                yield ev.RankRestored(worker, epoch)
            case do.AttachGroups(worker, epoch):
                yield ev.RankAttached(worker, epoch)
                yield ev.FirstStepCompleted(worker, epoch)
            case _:
                pass

    def safe(self, worker: WorkerId) -> peers.Safe:
        """Return what is said when a snapshot has arrived at the rank's buddies."""
        return peers.Safe(self.life, self.ranks[worker], (self.stand - 1, self.stand), transcript=True)


@dataclass
class Job:
    """A desk and its agents, with the bytes between them."""

    desk: Desk
    agents: Agents
    heard: int = 0
    """Messages that the coordinator has taken in."""

    def settle(self, watch: Callable[[], bool] | None = None) -> float:
        """Carry bytes to and fro until nobody has anything to say; return the coordinator's CPU seconds until `watch` is true."""
        desk, began = self.desk, self.desk.spent_s
        seen: float | None = None
        while desk.out:
            out, desk.out = desk.out, deque()
            said = [(node, each) for node, data in out for each in self.agents.hear(node, data)]
            if seen is None and watch is not None:
                until = self.say(said, watch)
                seen = None if until is None else until - began
            else:
                self.say(said)
        return desk.spent_s - began if seen is None else seen

    def say(self, said: list[tuple[NodeId, bytes]], watch: Callable[[], bool] = lambda: False) -> float | None:
        """Have the coordinator take in all of it; return its CPU seconds in all when `watch` became true."""
        desk, seen = self.desk, []

        def take() -> None:
            began = time.thread_time()
            for node, data in said:
                desk.feed(node, data)
                if not seen and watch():
                    seen.append(desk.spent_s + time.thread_time() - began)

        self.heard += len(said)
        desk.timed(take)
        return seen[0] if seen else None

    def start(self, nodes: int, spare_nodes: int) -> None:
        """Bring every node in, the first as the coordinator's own, and wait until every rank is protected."""
        for number in range(nodes + spare_nodes):
            name = f"node{number}"
            place = ev.Place(name, f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 29400)
            if number == 0:
                self.desk.timed(lambda place=place: self.desk.submit(ev.JobSubmitted(NodeId("node0"), place)))
            else:
                frame = peers.encode(peers.Join(place, 1))
                self.say([(NodeId(name), frame)])
            self.settle()
        assert self.desk.state.phase is JobPhase.RUNNING, self.desk.state.phase

    def beat(self, ranks_per_node: int) -> float:
        """Have each node give one sign of life; return the CPU seconds."""
        cells = tuple((rank, *[1 << 30] * WORDS) for rank in range(ranks_per_node))
        frame = peers.encode(peers.Beat(cells))
        began = self.desk.spent_s
        self.say([(node, frame) for node in self.desk.state.nodes])
        return self.desk.spent_s - began

    def snapshot(self) -> float:
        """Have every rank's next snapshot arrive at its buddies; return the CPU seconds."""
        self.agents.stand += 1
        began, owners = self.desk.spent_s, self.desk.state.owners()
        self.say([(member.node, peers.encode(self.agents.safe(member.worker))) for member in owners])
        self.settle()
        return self.desk.spent_s - began

    def lose(self, most: int) -> dict[str, float]:
        """Lose nodes that hold ranks, all at once; return the CPU seconds until orders are out, and until all is repaired.

        None of them holds copies of another's ranks: with one copy of each snapshot, that would end the job.
        """
        desk = self.desk
        nodes = self._unrelated(most)
        losses = [ev.NodeLost(node, "its connection was closed") for node in nodes]
        told = desk.timed(lambda: deque(map(desk.submit, losses), maxlen=0))
        desk.out = deque((node, data) for node, data in desk.out if node not in nodes)
        orders = len(desk.out)
        repaired = self.settle(lambda: desk.state.repair is not None and desk.state.repair.restored_at is not None)
        assert desk.state.phase is JobPhase.RUNNING, desk.state.reason
        assert desk.state.repair is None
        return {"nodes": len(nodes), "told": told, "orders": orders, "repaired": told + repaired}

    def _unrelated(self, most: int) -> set[NodeId]:
        state = self.desk.state
        related: dict[NodeId, set[NodeId]] = {node: set() for node in state.nodes}
        for seat in state.seats:
            for buddy in state.buddies[seat.rank]:
                related[seat.node].add(buddy)
                related[buddy].add(seat.node)
        found: set[NodeId] = set()
        for node in dict.fromkeys(seat.node for seat in state.seats):
            if node != "node0" and len(found) < most and not related[node] & found:
                found.add(node)
        return found


def resident_mib() -> float:
    """Return this process's resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("/proc/self/status has no VmRSS")


def measure(nodes: int, ranks_per_node: int, losses: list[int]) -> dict[str, Any]:
    """Return all that is to be known of one number of nodes."""
    import asyncio  # noqa: PLC0415 - a measurement has a loop of its own

    async def main(folder: str) -> dict[str, Any]:
        before = resident_mib()
        spare_nodes = sum(losses)
        settings = Settings(world_size=nodes * ranks_per_node, nodes=nodes, spare_nodes=spare_nodes)
        path = Path(folder) / "journal"
        job = Job(Desk(settings, path), Agents())
        job.start(nodes, spare_nodes)
        start_s, started = job.desk.spent_s, job.heard
        found: dict[str, Any] = {
            "nodes": nodes,
            "ranks": settings.world_size,
            "start_s": start_s,
            "start_messages": started,
            "start_us": 1e6 * start_s / started,
            "beat_us": 1e6 * min(job.beat(ranks_per_node) for _ in range(3)) / (nodes + spare_nodes),
            "snapshot_s": min(job.snapshot() for _ in range(SNAPSHOTS)),
            "losses": [],
        }
        for count in losses:
            heard, spent = job.heard, job.desk.spent_s
            loss = job.lose(count)
            spent = job.desk.spent_s - spent
            print(f"{nodes} nodes: lost {count} after {start_s:.0f} s of a start: {loss}", file=sys.stderr, flush=True)
            loss |= {
                "over": spent,
                "messages": job.heard - heard,
                "message_us": 1e6 * spent / max(1, job.heard - heard),
            }
            found["losses"].append(loss)
        return found | {
            "memory_mib": resident_mib() - before,
            "journal_mib": path.stat().st_size / 2**20,
            "messages_per_s": job.heard / job.desk.spent_s,
        }

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(main(folder))


def rows(found: list[dict[str, Any]]) -> Iterator[list[object]]:
    """Yield the table."""
    yield ["", *(f"{one['nodes']} nodes" for one in found)]
    yield ["ranks", *(one["ranks"] for one in found)]
    yield ["start: messages", *(one["start_messages"] for one in found)]
    yield ["start: CPU s", *(f"{one['start_s']:.2f}" for one in found)]
    yield ["start: us a message", *(f"{one['start_us']:.0f}" for one in found)]
    yield ["beat: us", *(f"{one['beat_us']:.0f}" for one in found)]
    yield ["snapshot of all ranks: CPU s", *(f"{one['snapshot_s']:.3f}" for one in found)]
    for at in range(len(found[0]["losses"])):
        lost = [one["losses"][at] for one in found]
        yield [f"loss {at + 1}: nodes", *(int(one["nodes"]) for one in lost)]
        yield ["  CPU s until all are told", *(f"{one['told']:.3f}" for one in lost)]
        yield ["  orders in it", *(int(one["orders"]) for one in lost)]
        yield ["  CPU s until repaired", *(f"{one['repaired']:.3f}" for one in lost)]
        yield ["  CPU s until over", *(f"{one['over']:.3f}" for one in lost)]
        yield ["  us a message", *(f"{one['message_us']:.0f}" for one in lost)]
    yield ["messages a CPU s, of all", *(f"{one['messages_per_s']:.0f}" for one in found)]
    yield ["memory: MiB", *(f"{one['memory_mib']:.0f}" for one in found)]
    yield ["journal: MiB", *(f"{one['journal_mib']:.1f}" for one in found)]


def losses_of(nodes: int) -> list[int]:
    """Return how many nodes are lost: one, and then 100 or a tenth of all."""
    return [1, min(100, max(1, nodes // 10))]


def main() -> None:
    """Measure each number of nodes in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="10,100,1000", help="numbers of nodes, separated by commas")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument(
        "--lose", help="how many nodes at once, one time after the other; default: 1, then 100 or a tenth"
    )
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--profile", help="of one number of nodes: where to put cProfile's statistics")
    options = parser.parse_args()
    given = [int(word) for word in options.lose.split(",")] if options.lose else None
    if options.one:
        print(json.dumps(measure(options.one, options.ranks_per_node, given or losses_of(options.one))))
        return
    numbers = [int(word) for word in options.nodes.split(",")]
    if options.profile:
        import cProfile  # noqa: PLC0415 - seldom needed

        with cProfile.Profile() as profile:
            measure(numbers[0], options.ranks_per_node, given or losses_of(numbers[0]))
        profile.dump_stats(options.profile)
        return
    header("one coordinator and many nodes", {"ranks a node": options.ranks_per_node, "beats": BEATS})
    found = []
    for number in numbers:
        command = [sys.executable, __file__, "--one", str(number), "--ranks-per-node", str(options.ranks_per_node)]
        command += ["--lose", options.lose] if options.lose else []
        found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    table(list(rows(found)))
    result("scale", {"ranks_per_node": options.ranks_per_node, "runs": found})


if __name__ == "__main__":
    main()
