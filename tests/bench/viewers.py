"""The leader's time for viewers: a status of many ranks, and some `status --watch` that read it.

    python tests/bench/viewers.py [--ranks 8000] [--viewers 4] [--seconds 20] [--quick]

A process with the real control socket, and the state of a job of 8 ranks a machine, serves viewers that ask for a status each
second. Its CPU time is counted, whatever it was used for.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import header, result, table
from kit.started import bring_up

from deadpool_run.coordinator.control import ControlServer
from deadpool_run.coordinator.requests import RequestHandler
from deadpool_run.core import coordinator
from deadpool_run.core import events as ev
from deadpool_run.core.settings import Settings
from deadpool_run.ids import NodeId, Rank, Version
from deadpool_run.vault.status_page import StatusPage, create_status_page
from deadpool_run.view.status_report import NodeReports, Seen, status_object
from deadpool_run.wire.peers import Traffic
from deadpool_run.wire.typed import to_json

RANKS_PER_NODE = 8
TRAFFIC = Traffic(1 << 40, 1 << 40, 1 << 30, 2e9, 2e9, 0.4, 0.1, 1 << 30, 0.5, 0)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8000)
    parser.add_argument("--viewers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--quick", action="store_true", help="5 seconds")
    args = parser.parse_args()
    args.seconds = 5.0 if args.quick else args.seconds
    return args


class Job:
    """A job that trains, as the leader knows it."""

    def __init__(self, ranks: int) -> None:
        nodes = ranks // RANKS_PER_NODE
        self.settings = Settings(world_size=nodes * RANKS_PER_NODE, nodes=nodes, spare_nodes=1)
        self.state = coordinator.new_state(self.settings)
        names = [NodeId(f"n{at}") for at in range(nodes + 1)]
        for at, name in enumerate(names):
            place = ev.Place(name, failure_domain=f"rack{at // 16}")
            self.submit(ev.NodeJoined(name, place) if at else ev.JobSubmitted(name, place))
        bring_up(self.state, self.submit)
        self.page = StatusPage(create_status_page(self.settings.world_size), self.settings.world_size)
        self.page.publish(Version(1000), ())
        self.nodes = NodeReports(names[0], 1, tuple(names[:5]), dict.fromkeys(names, Seen(1.0, TRAFFIC)), 2.0, 2.0)

    def submit(self, event: ev.Event) -> None:
        coordinator.step(self.settings, self.state, event, 1.0)

    def status(self) -> Mapping[str, Any]:
        return status_object(self.state, self.page, {"run_id": "bench"}, None, self.nodes, dropped={}, now=2.0)

    def holder(self, rank: Rank) -> None:  # noqa: ARG002 - no rank is killed here
        return None


def serve(job: Job, run_dir: Path, until: int) -> None:
    """Serve viewers until the pipe is closed; then exit and print nothing."""

    async def run() -> None:
        server = ControlServer(run_dir, RequestHandler(job.settings.world_size, job).encoded)
        await server.start()
        loop, over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(until, over.set)
        await over.wait()
        await server.close()

    asyncio.run(run())


def watch(run_dir: Path, over: threading.Event, seen: list[int]) -> None:
    with socket.socket(socket.AF_UNIX) as viewer:
        viewer.connect(str(run_dir / "control.sock"))
        viewer.sendall(json.dumps({"do": "watch", "every_s": 1.0}).encode() + b"\n")
        viewer.settimeout(10)
        while not over.is_set():
            seen.append(viewer.recv(1 << 20).count(b"\n"))


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, kernel included."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def watched(job: Job, args: argparse.Namespace) -> tuple[float, float]:
    """Return the share of a core that the server used, and the statuses that each viewer got in a second."""
    with tempfile.TemporaryDirectory(prefix="deadpool-bench-") as home:
        reads, writes = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(writes)
            serve(job, Path(home), reads)
            os._exit(0)
        while not (Path(home) / "control.sock").exists():
            time.sleep(0.01)
        over, seen = threading.Event(), [[] for _ in range(args.viewers)]
        viewers = [threading.Thread(target=watch, args=(Path(home), over, each)) for each in seen]
        for viewer in viewers:
            viewer.start()
        time.sleep(args.seconds / 2)  # what may be used at once has been used
        began, used_s, before = time.monotonic(), cpu_s(pid), sum(map(sum, seen))
        time.sleep(args.seconds)
        lasted_s = time.monotonic() - began
        share, got = (cpu_s(pid) - used_s) / lasted_s, sum(map(sum, seen)) - before
        over.set()
        for viewer in viewers:
            viewer.join()
        os.close(writes)
        os.waitpid(pid, 0)
        os.close(reads)
    return share, got / args.viewers / lasted_s


def main() -> int:
    args = options()
    header("the leader's time for viewers", vars(args))
    job = Job(args.ranks)
    costs = []
    for _ in range(9):
        began = time.process_time()
        encoded = to_json(job.status())
        costs.append(time.process_time() - began)
    cost_s, (share, rate) = median(costs), watched(job, args)
    table(
        [
            ["ranks", "a status", "CPU", "viewers", "statuses of each", "share of a core"],
            [
                job.settings.world_size,
                f"{len(encoded) / 1e6:.2f} MB",
                f"{1e3 * cost_s:.1f} ms",
                args.viewers,
                f"{rate:.2f}/s",
                f"{100 * share:.1f} %",
            ],
        ]
    )
    result(
        "viewers",
        {
            "parameters": vars(args),
            "status_bytes": len(encoded),
            "status_cpu_s": round(cost_s, 5),
            "statuses_per_s": round(rate, 3),
            "share": round(share, 4),
        },
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
