"""The cost of one leader with many nodes: a real agent, with simulated nodes at the other ends of real connections.

    python tests/bench/scale.py [--nodes 1000,10000] [--ranks-per-node 8] [--lose 1,64] [--json]

Two agents are real, each in its own process: the leader, and a voter that becomes leader after it. Each does all work with
other agents: connections, handshakes, frames, decisions, journal, election, log followers, heartbeats. A few other processes
simulate the other nodes with real connections, and obey at once. Workers are simulated. All times are CPU seconds of one
agent, kernel included, so other load hardly changes them. For an agent with its own core, they equal wall time.

* start: from the first node's arrival until every rank is protected.
* heartbeat: one heartbeat to every node, with the answers. A job sends five of these per `--node-timeout`.
* loss: from the loss of that number of nodes at once until the last survivor has its order to stop the step (`told`), until
  the last has its order to attach (`attach`), and until every rank has completed a step (`over`).
* voter: as a loss, until another node votes and follows the log.
* leader: as a loss, from the news that the leader's agent has ended, until every node knows the new leader (`known`: it tells
  some nodes, and these tell the others), until all have connected and have its order to stop the step, and so on.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any

from common import header, result, table
from scale_agent import CREDENTIALS

from deadpool_run.core.leadership.electorate import AgentEnded
from deadpool_run.ids import NodeId
from deadpool_run.transport import handshake
from deadpool_run.wire import peers
from deadpool_run.wire.auth import ConnectionRole

HERE = Path(__file__).resolve().parent
_SHOWN_BYTES = 4000
CROWD = 2500
"""The number of simulated nodes per process."""


class Agent:
    """The process of an agent, or of simulated nodes."""

    def __init__(self, script: str, *words: object) -> None:
        command = [sys.executable, str(HERE / script), *map(str, words)]
        self._errors = TemporaryFile()  # noqa: SIM115 - closed with this object
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )

    def read(self) -> dict[str, Any]:
        """Return the next answer of the process."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._errors.seek(0)
            note(self._errors.read()[-_SHOWN_BYTES:].decode(errors="replace"))
            raise SystemExit(f"{self.process.args} ended")
        return dict(json.loads(line))

    def close(self) -> None:
        """Forget what it has written."""
        self._errors.close()

    def ask(self, *words: object) -> dict[str, Any]:
        """Send a command, and return the answer."""
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)
        return self.read()

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process, kernel included: its `time.process_time`."""
        return time.clock_gettime(~self.process.pid << 3 | 2)  # clock_getcpuclockid(3)


@contextmanager
def started(script: str, *words: object) -> Iterator[Agent]:
    """Start a process, and end it after the block."""
    agent = Agent(script, *words)
    try:
        yield agent
    finally:
        agent.process.kill()
        agent.process.communicate()
        agent.close()


def measure(nodes: int, ranks_per_node: int, losses: list[int]) -> dict[str, Any]:
    """Return all figures for one number of nodes."""
    spare_nodes = sum(losses) + 2  # a voter and the leader are lost, too
    shape = ("--nodes", nodes, "--spare-nodes", spare_nodes, "--ranks-per-node", ranks_per_node)
    with ExitStack() as stack:
        folder = ("--folder", stack.enter_context(TemporaryDirectory()))
        leader = stack.enter_context(started("scale_agent.py", *shape, *folder))
        port = leader.read()["port"]
        successor = stack.enter_context(started("scale_agent.py", *shape, *folder, "--join", port))
        successor_port = successor.read()["port"]
        others = nodes + spare_nodes - 2
        crowds = []
        for first in range(0, others, CROWD):
            numbers = ("--numbers", first, min(first + CROWD, others))
            crowds.append(stack.enter_context(started("scale_crowd.py", *shape, "--join", port, *numbers)))
        found: dict[str, Any] = {"nodes": nodes, "ranks": nodes * ranks_per_node}
        found |= {f"start_{key}": value for key, value in leader.ask("protected").items()}
        note(f"{nodes} nodes: started in {found['start_cpu_s']:.1f} CPU s")
        found["heartbeat_us"] = 1e6 * min(leader.ask("heartbeats")["cpu_s"] for _ in range(2)) / (nodes + spare_nodes)
        found["losses"] = [{"nodes": count, **leader.ask("lose", count)} for count in losses]
        note(f"{nodes} nodes: nodes lost")
        found["voter"] = leader.ask("voter")
        note(f"{nodes} nodes: voter lost")
        before = successor.ask("followed", leader.ask("protected")["entries"])["cpu_s"]
        leader.process.kill()
        with handshake.dial("127.0.0.1", successor_port, ConnectionRole.VOTE, CREDENTIALS) as connection:
            connection.send(peers.encode(AgentEnded(NodeId("leader"))))
            for crowd in crowds:
                crowd.ask("heard")
            known_s = successor.cpu_s() - before
            found["leader"] = {"known_s": known_s, **successor.ask("led", before)}
        note(f"{nodes} nodes: leader lost")
        return found | {"memory_mib": memory_mib(successor.process.pid)}


def memory_mib(pid: int) -> float:
    """Return a process's resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


def note(text: str) -> None:
    """Print the progress to stderr."""
    print(text, file=sys.stderr, flush=True)


ROWS: tuple[tuple[str, str, str], ...] = (
    ("ranks", "ranks", "d"),
    ("start: CPU s", "start_cpu_s", ".2f"),
    ("heartbeat and its answer: us per node", "heartbeat_us", ".0f"),
)
LOSS_ROWS: tuple[tuple[str, str, str], ...] = (
    ("  CPU s until all have the order to stop the step", "told_s", ".3f"),
    ("  CPU s until all have the order to attach", "attach_s", ".2f"),
    ("  CPU s until all have completed a step", "over_s", ".2f"),
)
KNOWN_ROWS: tuple[tuple[str, str, str], ...] = (("  CPU s until all know the new leader", "known_s", ".3f"),)
LAST_ROWS: tuple[tuple[str, str, str], ...] = (("memory of the new leader: MiB", "memory_mib", ".0f"),)


def rows(found: list[dict[str, Any]]) -> Iterator[list[object]]:
    """Yield the rows of the table. The last column is the ratio of the last run's figure to the first run's."""
    yield ["", *(f"{one['nodes']} nodes" for one in found), f"x {found[-1]['nodes'] / found[0]['nodes']:.3g} nodes"]
    yield from lines(ROWS, found)
    for at, loss in enumerate(found[0]["losses"]):
        yield [f"loss of {loss['nodes']} at once", *[""] * (len(found) + 1)]
        yield from lines(LOSS_ROWS, [one["losses"][at] for one in found])
    for what in ("voter", "leader"):
        yield [f"loss of a {what}", *[""] * (len(found) + 1)]
        if what == "leader":
            yield from lines(KNOWN_ROWS, [one[what] for one in found])
        yield from lines(LOSS_ROWS, [one[what] for one in found])
    yield from lines(LAST_ROWS, found)


def lines(wanted: tuple[tuple[str, str, str], ...], found: list[dict[str, Any]]) -> Iterator[list[object]]:
    """Yield one line for each figure."""
    for title, key, form in wanted:
        values = [one[key] for one in found]
        yield [title, *(format(value, form) for value in values), f"x {values[-1] / values[0]:.3g}"]


def numbers(text: str) -> list[int]:
    """Return the numbers of a list with commas."""
    return [int(word) for word in text.split(",")]


def main() -> None:
    """Measure each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=numbers, default=[1000, 10000], help="numbers of nodes, separated by commas")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument(
        "--lose", type=numbers, default=[1, 64], help="numbers of nodes to lose at once, one loss for each number"
    )
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    header("one leader and many nodes", {"ranks a node": options.ranks_per_node})
    found = [measure(nodes, options.ranks_per_node, options.lose) for nodes in options.nodes]
    table(list(rows(found)))
    result("scale", {"ranks_per_node": options.ranks_per_node, "runs": found})


if __name__ == "__main__":
    main()
