"""A launcher on several hosts, which are network namespaces. The benchmark kills hosts and watches from outside."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from common import POLL_S, BenchError, Stamp, StepLog
from kit.netns import Hosts, enter
from kit.processes import MARK, kill_marked, marked

from deadpool_run.coordinator.address import SOCKET_NAME, control_address

STATUS_S = 0.05
_CHUNK_BYTES = 1 << 20
_PIECE_BYTES = 64 << 20

Command = Callable[[int, str], Sequence[object]]
"""Returns the launcher's command line for a host's number and the endpoint."""


@dataclass
class Agent:
    """A host's launcher, and all its descendants."""

    process: subprocess.Popen[bytes]
    mark: str
    log: Path


@dataclass
class Fleet:
    """A launcher on each host. As a context manager, it ends all processes."""

    home: Path
    hosts: Hosts
    ranks: int
    command: Command
    endpoint: str
    env: dict[str, str] = field(default_factory=dict)
    agents: dict[int, Agent] = field(default_factory=dict)
    logs: list[StepLog] = field(init=False)

    def __enter__(self) -> Self:
        for folder in ("steps", "digests", "logs"):
            (self.home / folder).mkdir(parents=True)
        self.logs = [StepLog(self.home / "steps" / f"rank{rank}") for rank in range(self.ranks)]
        for host in range(len(self.hosts.names)):
            self.start(host, self.endpoint)
        return self

    def __exit__(self, *_: object) -> None:
        for host in list(self.agents):
            self.kill(host)

    def start(self, host: int, endpoint: str) -> None:
        """Start the launcher on a host, for the first time or again."""
        mark = uuid.uuid4().hex
        log = self.home / "logs" / f"host{host}.{mark[:6]}"
        words = ["ip", "netns", "exec", self.hosts.names[host], *map(str, self.command(host, endpoint))]
        with log.open("wb") as output:
            process = subprocess.Popen(
                words,
                env={**os.environ, "OMP_NUM_THREADS": "1", **self.env, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self.agents[host] = Agent(process, mark, log)

    def kill(self, host: int) -> int:
        """Kill all of a host's processes, as a power cut would. Return the time just before."""
        agent = self.agents.pop(host)
        pids = sorted(marked(agent.mark), key=lambda pid: pid != agent.process.pid)
        began_ns = time.monotonic_ns()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.process.wait()
        kill_marked(agent.mark)
        return began_ns

    def host_of(self, pid: int) -> int:
        """Return the host of a process. Raises BenchError."""
        for host, agent in self.agents.items():
            if pid in marked(agent.mark):
                return host
        raise BenchError(f"process {pid} is on no host")

    def wait(self, what: str, condition: Callable[[], Any], bound_s: float, poll_s: float = POLL_S) -> Any:
        """Wait for a true value of the condition, and return it. Raises BenchError after `bound_s`, or if all agents end."""
        deadline = time.monotonic() + bound_s
        while not (value := condition()):
            if time.monotonic() > deadline or all(a.process.poll() is not None for a in self.agents.values()):
                raise BenchError(f"waited {bound_s:.0f} s until {what}\n{self.told()}")
            time.sleep(poll_s)
        return value

    def told(self) -> str:
        """Return the last output of every launcher."""
        return "\n".join(
            f"--- host {host}\n" + "\n".join(agent.log.read_text(errors="replace").splitlines()[-20:])
            for host, agent in self.agents.items()
        )

    def completed(self) -> int:
        """Return the number of steps that every rank has completed."""
        return min((log.read()[-1].step + 1 if log.read() else 0) for log in self.logs)

    def last(self, rank: int) -> Stamp:
        """Return the rank's last completed step."""
        return self.logs[rank].read()[-1]

    # --- only for deadpool-run -----------------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        """The folder of the control sockets."""
        return self.home / "run"

    def status(self) -> dict[str, Any]:
        """Return the status, which is the same from every agent. Empty while no agent lives."""
        for path in (self.run_dir, *self.run_dir.glob("node-*")):
            with contextlib.suppress(OSError, ValueError):
                if "error" not in (answer := _ask(path)):
                    return answer
        return {}

    def incidents(self) -> Iterator[dict[str, Any]]:
        """Yield the repairs that coordinators reported. Their times count from the first known loss."""
        for path in self.run_dir.rglob("journal.jsonl"):
            for line in path.read_text(encoding="utf-8").splitlines()[1:]:
                if "ReportIncident" not in line or not line.endswith("}"):
                    continue
                entry = json.loads(line)
                for effect in entry["effects"]:
                    if effect["type"] == "ReportIncident":
                        yield effect["incident"]


def _ask(run_dir: Path) -> dict[str, Any]:
    if not (run_dir / SOCKET_NAME).exists():
        raise FileNotFoundError(run_dir)
    with socket.socket(socket.AF_UNIX) as control, control.makefile("rw") as stream:
        control.settimeout(5)
        with control_address(run_dir) as address:
            control.connect(address)
        stream.write('{"do": "status"}\n')
        stream.flush()
        answer: dict[str, Any] = json.loads(stream.readline())
    return answer


def link_bytes_per_s(hosts: Hosts, nbytes: int) -> float:
    """Return the bandwidth of a plain loop of sendfile and recv_into between two hosts, over one connection."""
    listening, took = threading.Event(), []

    def receive() -> None:
        enter(hosts.names[1])
        with socket.create_server((hosts.addresses[1], 29999)) as server:
            listening.set()
            sock, _ = server.accept()
            buffer, left = memoryview(bytearray(_CHUNK_BYTES)), nbytes
            with sock:
                began = time.monotonic()
                while left > 0:
                    left -= sock.recv_into(buffer, min(left, _CHUNK_BYTES), socket.MSG_WAITALL)
                took.append(time.monotonic() - began)

    def send() -> None:
        enter(hosts.names[0])
        fd = os.memfd_create("link")
        os.write(fd, bytes(_PIECE_BYTES))
        with socket.create_connection((hosts.addresses[1], 29999)) as sock:
            for _ in range(nbytes // _PIECE_BYTES):
                offset = 0
                while offset < _PIECE_BYTES:
                    offset += os.sendfile(sock.fileno(), fd, offset, _PIECE_BYTES - offset)
        os.close(fd)

    threads = [threading.Thread(target=receive), threading.Thread(target=send)]
    threads[0].start()
    listening.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(60)
    return nbytes / took[0]
