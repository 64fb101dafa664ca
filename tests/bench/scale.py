"""What one coordinator costs that leads many nodes: the real one, with simulated agents, every message through the wire layer.

    python tests/bench/scale.py [--nodes 1000,10000] [--ranks-per-node 8] [--lose 1,100] [--json]

Each number of nodes is run in a process of its own. What is real: `CoordinatorServer` (decisions), `Journal` (to a
temporary file), the log to two log followers, `Tracking` and `Commits`, the status page, `wire.peers` in both
directions, frames cut from bytes. What is simulated: the agents (they obey at once), sockets and the kernel (bytes are
handed over within the process). Figures are the coordinator's side alone: bytes in, decode, core, journal, encode, bytes
out; the agents' side is not in them. All times are CPU seconds of the one thread, so that a busy machine hardly changes
them; a coordinator with a core of its own takes as long on the clock.

* start: from the first node's arrival until every rank is protected.
* beats, snapshots: messages of a job in which nothing goes wrong. A second of it costs nodes x 5 / `--node-timeout` beats
  and, for every snapshot, a message a rank and one to every node.
* election: what `core.election`, which is told every beat too, takes for one; it is in no other figure.
* loss: from the closed connections of so many nodes at once until the bytes of the last order that follows from them
  alone (`told`), until those of the last `AttachGroups` (`repaired`), and until every rank has completed a step (`over`).
"""

import argparse
import asyncio
import cProfile
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import header, result, table
from scale_agents import Agents, heartbeat_ack
from scale_leader import LOG_FOLLOWERS, Leader

from deadpool_run.agent.cluster.leadership import LOOKS
from deadpool_run.core import events as ev
from deadpool_run.core.leadership import election, electorate
from deadpool_run.core.settings import Settings
from deadpool_run.core.transitions import JobPhase
from deadpool_run.ids import NodeId
from deadpool_run.wire import peers

BEATS = 5
"""Signs of life of a node in one `--node-timeout`."""
ROUNDS = 2
"""Of beats and of snapshots: the cheaper one counts."""


@dataclass
class Job:
    """A coordinator's agent and the others, with the bytes between them."""

    leader: Leader
    agents: Agents
    heard: int = 0
    """Messages that the coordinator has taken in."""

    def settle(self, watch: Callable[[], bool] | None = None) -> float:
        """Carry bytes to and fro until nobody has anything to say; return the coordinator's CPU seconds until `watch` is true."""
        leader, began = self.leader, self.leader.spent_s
        seen: float | None = None
        while leader.out:
            out, leader.out = leader.out, deque()
            said = [(node, each) for node, data in out for each in self.agents.hear(node, data)]
            if seen is None and watch is not None:
                until = self.say(said, watch)
                seen = None if until is None else until - began
            else:
                self.say(said)
        return leader.spent_s - began if seen is None else seen

    def say(self, said: list[tuple[NodeId, bytes]], watch: Callable[[], bool] | None = None) -> float | None:
        """Have the coordinator take in all of it; return its CPU seconds in all when `watch` became true."""
        leader, seen = self.leader, []

        def take() -> None:
            began = time.thread_time()
            for node, data in said:
                leader.feed(node, data)
                if watch is not None and not seen and watch():
                    seen.append(leader.spent_s + time.thread_time() - began)

        self.heard += len(said)
        leader.timed(take)
        return seen[0] if seen else None

    def start(self, nodes: int) -> None:
        """Bring every node in, the first as the coordinator's own, and wait until every rank is protected."""
        for number in range(nodes):
            place = ev.Place(f"node{number}", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 29400)
            if number == 0:
                submitted = ev.JobSubmitted(NodeId(place.name), place)
                self.leader.timed(lambda submitted=submitted: self.leader.submit(submitted))
            else:
                self.say([(NodeId(place.name), peers.encode(peers.Join(place, {})))])
            self.settle()
        assert self.leader.state.phase is JobPhase.RUNNING, self.leader.state.phase

    def heartbeat_ack(self) -> float:
        """Have each node give one sign of life; return the CPU seconds."""
        state, began = self.leader.state, self.leader.spent_s
        ranks = {node: sorted(state.ranks_on(node)) for node in state.nodes}
        self.say([(node, heartbeat_ack(ranks[node])) for node in state.nodes])
        return self.leader.spent_s - began

    def snapshot(self) -> float:
        """Have every rank's next snapshot arrive at its buddies; return the CPU seconds."""
        self.agents.stand += 1
        began, owners = self.leader.spent_s, self.leader.state.owners()
        self.say([(member.node, peers.encode(self.agents.safe(member.worker))) for member in owners])
        self.settle()
        return self.leader.spent_s - began

    def lose(self, most: int) -> dict[str, float]:
        """Lose nodes that hold ranks, all at once; return the CPU seconds until orders are out, and until all is repaired.

        None of them holds copies of another's ranks: with one copy of each snapshot, that would end the job.
        """
        leader, nodes, epoch = self.leader, self._unrelated(most), self.leader.state.epoch
        losses = ev.NodesLost(tuple(ev.NodeLost(node, "its connection was closed") for node in nodes))
        heard, spent = self.heard, leader.spent_s
        told = leader.timed(lambda: leader.submit(losses))
        assert not any(node in nodes for node, _ in leader.out), "an order was given to a node that is lost"
        orders = len(leader.out)
        repaired = self.settle(lambda: leader.state.repair is not None and leader.state.repair.restored_at is not None)
        assert leader.state.phase is JobPhase.RUNNING, leader.state.reason
        assert leader.state.repair is None
        assert leader.state.epoch == epoch + 1, "losses that were found together took more than one epoch"
        over, messages = leader.spent_s - spent, self.heard - heard
        return {
            "nodes": len(nodes),
            "orders": orders,
            "told_s": told,
            "repaired_s": told + repaired,
            "over_s": over,
            "messages": messages,
            "message_us": 1e6 * over / messages,
        }

    def _unrelated(self, most: int) -> set[NodeId]:
        state = self.leader.state
        related: dict[NodeId, set[NodeId]] = {node: set() for node in state.nodes}
        for seat in state.seats:
            assert seat.node is not None
            for buddy in state.buddies[seat.rank]:
                related[seat.node].add(buddy)
                related[buddy].add(seat.node)
        found: set[NodeId] = set()
        for node in dict.fromkeys(seat.node for seat in state.seats):
            if node != "node0" and len(found) < most and not related[node] & found:
                found.add(node)
        return found


def election_us(nodes: list[NodeId]) -> float:
    """Return what the election takes for one beat, in CPU microseconds."""
    leader, *others = nodes
    now = dict.fromkeys(nodes, 0.0)
    agent = electorate.Agent(
        leader,
        5.0,
        electorate.ElectionRole.LEADER,
        (electorate.Configuration(0, 1, leader, tuple(nodes[:5])),),
        0.0,
        0.0,
        answers=now,
        answered_at={node: now[node] for node in others},
        known=dict.fromkeys(nodes[:5], 1),
        looked_at=1.0,
    )
    began = time.thread_time()
    share = -(-len(others) * BEATS // LOOKS)  # of a time-out's beats, as the agent looks at them
    for at in range(0, len(others), share):
        heard = tuple(electorate.HeardFromAgent(other, 0, 1.0, 1) for other in others[at : at + share])
        agent, outputs = election.step(agent, electorate.HeardFromAgents(heard), 1.0)
        election.next_deadline(agent)
        assert not outputs
    return 1e6 * (time.thread_time() - began) / len(others)


def resident_mib() -> float:
    """Return this process's resident memory."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("/proc/self/status has no VmRSS")


async def measure(folder: Path, nodes: int, ranks_per_node: int, losses: list[int]) -> dict[str, Any]:
    """Return all that is to be known of one number of nodes."""
    before, began = resident_mib(), time.monotonic()
    spare_nodes = sum(losses)
    settings = Settings(world_size=nodes * ranks_per_node, nodes=nodes, spare_nodes=spare_nodes)
    job = Job(Leader(settings, folder / "journal"), Agents())
    job.start(nodes + spare_nodes)
    start_s, started = job.leader.spent_s, job.heard
    note(f"{nodes} nodes: started in {start_s:.1f} CPU s, {time.monotonic() - began:.0f} s in all")
    found: dict[str, Any] = {
        "nodes": nodes,
        "ranks": settings.world_size,
        "start_s": start_s,
        "start_messages": started,
        "start_us": 1e6 * start_s / started,
        "heartbeat_ack_us": 1e6 * min(job.heartbeat_ack() for _ in range(ROUNDS)) / (nodes + spare_nodes),
        "election_us": election_us(list(job.leader.state.nodes)),
        "snapshot_s": min(job.snapshot() for _ in range(ROUNDS)),
        "losses": [],
    }
    found["snapshot_us"] = 1e6 * found["snapshot_s"] / settings.world_size
    for count in losses:
        loss = job.lose(count)
        note(
            f"{nodes} nodes: lost {count}, told in {loss['told_s']:.2f} CPU s; {time.monotonic() - began:.0f} s in all"
        )
        found["losses"].append(loss)
    return found | {
        "messages": job.heard,
        "messages_per_s": job.heard / job.leader.spent_s,
        "message_us": 1e6 * job.leader.spent_s / job.heard,
        "memory_mib": resident_mib() - before,
        "journal_mib": (folder / "journal").stat().st_size / 2**20,
        "log_mib": job.leader.logged_bytes / 2**20,
        "wall_s": time.monotonic() - began,
    }


def note(text: str) -> None:
    """Tell whoever waits how far it is."""
    print(text, file=sys.stderr, flush=True)


ROWS: tuple[tuple[str, str, str], ...] = (
    ("ranks", "ranks", "d"),
    ("start: messages", "start_messages", "d"),
    ("start: CPU s", "start_s", ".2f"),
    ("start: us a message", "start_us", ".0f"),
    ("beat: us", "heartbeat_ack_us", ".0f"),
    ("beat in the election: us", "election_us", ".0f"),
    ("snapshot of all ranks: CPU s", "snapshot_s", ".3f"),
    ("snapshot: us a rank", "snapshot_us", ".0f"),
)
LOSS_ROWS: tuple[tuple[str, str, str], ...] = (
    ("  orders that follow at once", "orders", "d"),
    ("  CPU s until all are told", "told_s", ".3f"),
    ("  CPU s until repaired", "repaired_s", ".2f"),
    ("  CPU s until over", "over_s", ".2f"),
    ("  messages", "messages", "d"),
    ("  us a message", "message_us", ".0f"),
)
LAST_ROWS: tuple[tuple[str, str, str], ...] = (
    ("messages in all", "messages", "d"),
    ("us a message, of all", "message_us", ".0f"),
    ("messages a CPU s, of all", "messages_per_s", ".0f"),
    ("memory: MiB, agents included", "memory_mib", ".0f"),
    ("journal: MiB", "journal_mib", ".1f"),
    (f"log to {LOG_FOLLOWERS} log followers: MiB", "log_mib", ".1f"),
    ("this run: s", "wall_s", ".0f"),
)


def rows(found: list[dict[str, Any]]) -> Iterator[list[object]]:
    """Yield the table; its last column is how often the first run's figure the last run's is."""
    yield ["", *(f"{one['nodes']} nodes" for one in found), f"x {found[-1]['nodes'] / found[0]['nodes']:.3g} nodes"]
    yield from lines(ROWS, found)
    for at in range(len(found[0]["losses"])):
        lost = [one["losses"][at] for one in found]
        yield [f"loss of {lost[0]['nodes']} at once", *[""] * (len(found) + 1)]
        yield from lines(LOSS_ROWS, lost)
    yield from lines(LAST_ROWS, found)


def lines(wanted: tuple[tuple[str, str, str], ...], found: list[dict[str, Any]]) -> Iterator[list[object]]:
    """Yield one line for each figure."""
    for title, key, form in wanted:
        values = [one[key] for one in found]
        yield [title, *(format(value, form) for value in values), f"x {values[-1] / values[0]:.3g}"]


def numbers(text: str) -> list[int]:
    """Return what is separated by commas."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Measure each number of nodes in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=numbers, default=[1000, 10000], help="numbers of nodes, separated by commas")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument(
        "--lose", type=numbers, default=[1, 100], help="how many nodes at once, one time after the other"
    )
    parser.add_argument("--one", action="store_true", help="print the figures of the first number of nodes as JSON")
    parser.add_argument("--profile", help="of the first number of nodes: where to put cProfile's statistics")
    options = parser.parse_args()
    if options.one or options.profile:
        with (
            tempfile.TemporaryDirectory() as folder,
            cProfile.Profile() if options.profile else tempfile.TemporaryFile() as profile,
        ):
            found = asyncio.run(measure(Path(folder), options.nodes[0], options.ranks_per_node, options.lose))
        if options.profile:
            profile.dump_stats(options.profile)
        print(json.dumps(found))
        return
    header("one coordinator and many nodes", {"ranks a node": options.ranks_per_node, "beats": BEATS})
    found = []
    for nodes in options.nodes:
        given = {
            "--nodes": str(nodes),
            "--ranks-per-node": options.ranks_per_node,
            "--lose": ",".join(map(str, options.lose)),
        }
        command = [sys.executable, __file__, "--one", *(str(word) for pair in given.items() for word in pair)]
        found.append(json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))
    table(list(rows(found)))
    result("scale", {"ranks_per_node": options.ranks_per_node, "runs": found})


if __name__ == "__main__":
    main()
