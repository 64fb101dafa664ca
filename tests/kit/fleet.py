"""A real job on several hosts, and what a test does to them. A host is a network namespace with an agent."""

import contextlib
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from kit.account import Account, Event, States
from kit.cluster import SCRIPTS
from kit.netns import Hosts
from kit.processes import MARK, kill_marked, marked, wait_gone

PORT = 29400
START_TIMEOUT_S = 90.0
LINES_SHOWN = 40


class Agent:
    """The `deadpool-run` of one host. Its output goes to files of the host."""

    def __init__(self, host: int, command: Sequence[str], env: dict[str, str], folder: Path) -> None:
        self.host = host
        self.mark = env[MARK]
        self._output = folder / f"agent{host}.{self.mark[:4]}.log"
        with self._output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=env
            )
        self.pidfd = os.pidfd_open(self.process.pid)
        self.exit_code: int | None = None

    @property
    def output(self) -> str:
        """The output of the agent and its workers so far."""
        return self._output.read_text(errors="replace")

    def everything(self, number: signal.Signals) -> list[int]:
        """Send a signal to the agent and all its descendants at once. Return the pids."""
        found = marked(self.mark)
        for pid in sorted(found, key=lambda pid: pid != self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        return list(found)


class Fleet:
    """`hosts` agents in the namespaces `net`. The first host is the endpoint, so its agent founds the job.

    With `apart` the agents share no run directory, and each knows only the address of the first one. `plant` is code, such
    as a planted bug, that Python runs at its start on the first host. `lines` are for bash on every other host, in place of
    the agent: `deadpool-run` in them is the agent, whatever its options, or a command for the agent's run.
    """

    def __init__(
        self,
        home: Path,
        net: Hosts,
        *args: str,
        hosts: int = 4,
        spares: str = "1",
        nproc: int = 2,
        options: Sequence[str] = (),
        script: str = "train.py",
        node_timeout_s: float = 3.0,
        apart: bool = False,
        plant: str = "",
        host_options: Mapping[int, Sequence[str]] = MappingProxyType({}),
        lines: str = "",
    ) -> None:
        self.apart = apart
        self._host_options = host_options
        self._lines = lines
        self._plant = home / "plant"
        self._plant.mkdir()
        (self._plant / "sitecustomize.py").write_text(plant, encoding="utf-8")
        self.node_timeout_s = node_timeout_s
        self.home = home
        self.net = net
        self.run_dir = home / "run"
        self.flags = home / "flags"
        self.temporary = home / "tmp"
        self.events: list[Event] = []
        self._partial = b""
        self._token = uuid.uuid4().hex
        for folder in (self.flags, self.temporary):
            folder.mkdir()
        os.mkfifo(home / "events")
        os.mkfifo(self.flags / "release")
        self._fifo = os.open(home / "events", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._gate = os.open(self.flags / "release", os.O_RDWR | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._fifo, selectors.EVENT_READ, None)
        self._words = (
            *("--no-config", "--nnodes", str(hosts), "--spares", spares, "--nproc-per-node", str(nproc)),
            *("--node-timeout", str(node_timeout_s), *options),
            *(str(SCRIPTS / script), "--flags", str(self.flags), *args),
        )
        self.agents = [self.start(host) for host in range(hosts)]

    def start(self, host: int) -> Agent:
        """Start an agent on a host (again)."""
        addresses = self.net.addresses[:1] if self.apart else self.net.addresses
        words = (
            *("--node-name", f"h{host}"),
            *("--rdzv-endpoint", ",".join(f"{address}:{PORT}" for address in addresses)),
            *("--run-dir", str(self.run_dir / f"of-h{host}" if self.apart else self.run_dir)),
            *self._host_options.get(host, ()),
            *self._words,
        )
        program = [sys.executable, "-m", "deadpool_run", *words]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("DEADPOOL_", "PET_"))}
        env = {
            **inherited,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self.temporary),
            "KIT_EVENTS": str(self.home / "events"),
            "DEADPOOL_TOKEN": self._token,
            MARK: uuid.uuid4().hex,
        }
        if host == 0:
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(self._plant), env.get("PYTHONPATH"))))
        elif self._lines:
            env["PATH"] = f"{self._commands(host, program)}:{os.environ['PATH']}"
            program = ["bash", "-c", self._lines]
        command = ["ip", "netns", "exec", self.net.names[host], *program]
        agent = Agent(host, command, env, self.home)
        self._selector.register(agent.pidfd, selectors.EVENT_READ, agent)
        return agent

    def _commands(self, host: int, agent: Sequence[str]) -> Path:
        """Make the host's folder with `deadpool-run`; return the folder."""
        folder = self.home / f"bin-h{host}"
        folder.mkdir()
        drain = shlex.join((sys.executable, "-m", "deadpool_run"))
        (folder / "deadpool-run").write_text(
            f'#!/bin/sh\n[ "$1" = drain ] || exec {shlex.join(agent)}\nexec {drain} "$@" --run-dir {self.run_dir}/node-h{host}\n'
        )
        (folder / "deadpool-run").chmod(0o700)
        return folder

    # --- reading and waiting -------------------------------------------------------------------------------------

    @property
    def account(self) -> Account:
        """The output of the script so far."""
        return Account(self.events)

    def wait_until(self, met: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> Any:
        """Return the first true value of `met`. It is called after each event of a script and each end of an agent."""
        deadline = time.monotonic() + timeout_s
        while not (value := met()):
            left = deadline - time.monotonic()
            if left <= 0:
                raise AssertionError(f"no {what} within {timeout_s} s\n{self.told()}")
            self._read(left)
            if all(agent.exit_code is not None for agent in self.agents) and not met():
                raise AssertionError(f"every agent ended before {what}\n{self.told()}")
        return value

    def wait_state(self, rank: int, version: int, *, pid_not: Sequence[int] = ()) -> Event:
        """Return the rank's first state at this version or later, from a process other than these."""

        def met() -> list[Event]:
            found = self.account.of("state", rank=rank)
            return [e for e in found if e["version"] >= version and e["pid"] not in pid_not][:1]

        return self.wait_until(met, f"rank {rank} at version {version}")[0]

    def wait_output(self, host: int, text: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the host's agent has printed this text."""
        self.look_until(lambda: text in self.agents[host].output, f"{text!r} on host {host}", timeout_s)

    def look_until(self, seen: Callable[[], Any], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
        """Check `seen` after every event until it is true: for contents of files, which cannot be waited for."""
        deadline = time.monotonic() + timeout_s
        while not seen():
            assert time.monotonic() < deadline, f"no {what} within {timeout_s} s\n{self.told()}"
            self._read(0.05)

    def wait_exit(self, hosts: Sequence[int], timeout_s: float = 120.0) -> list[int]:
        """Return the exit codes of these hosts' agents."""
        agents = [self.agents[host] for host in hosts]
        self.wait_until(
            lambda: all(agent.exit_code is not None for agent in agents), f"end of hosts {hosts}", timeout_s
        )
        while self._read(0):
            pass
        return [agent.exit_code for agent in agents if agent.exit_code is not None]

    def _read(self, timeout_s: float) -> int:
        ready = self._selector.select(max(0.0, timeout_s))
        for key, _ in ready:
            if isinstance(key.data, Agent):
                self._selector.unregister(key.fd)
                key.data.exit_code = key.data.process.wait()
            else:
                *lines, self._partial = (self._partial + os.read(key.fd, 1 << 16)).split(b"\n")
                self.events += map(json.loads, lines)
        return len(ready)

    def told(self) -> str:
        """Return the last output and events, for the message of a failure."""
        parts = {f"host {a.host} ({a.exit_code})": "\n".join(a.output.splitlines()[-LINES_SHOWN:]) for a in self.agents}
        parts["events"] = "\n".join(map(json.dumps, self.events[-16:]))
        parts["running"] = "\n".join(f"{a.host}: {pid} {c}" for a in self.agents for pid, c in marked(a.mark).items())
        return "\n".join(f"--- {name}\n{text}" for name, text in parts.items())

    # --- acting --------------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any] | None:
        """Return the leader's status; None while there is no leader."""
        for path in self.run_dir.rglob("control.sock"):
            with socket.socket(socket.AF_UNIX) as sock, contextlib.suppress(OSError):
                sock.settimeout(5)
                sock.connect(str(path))
                with sock.makefile("rwb") as file:
                    file.write(b'{"do":"status"}\n')
                    file.flush()
                    if (found := json.loads(file.readline() or b"{}")).get("nodes"):
                        return dict(found)
        return None

    def wait_whole(self, hosts: int, spares: int, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the job runs with `hosts` nodes and `spares` ready spares."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self.status()
            ready = 0 if found is None else sum(spare["phase"] == "ready" for spare in found["spares"])
            if found and found["phase"] == "running" and len(found["nodes"]) == hosts and ready >= spares:
                return
            assert time.monotonic() < deadline, f"not {hosts} nodes and {spares} spares: {found}\n{self.told()}"
            self._read(0.05)

    def wait_voters(self, hosts: int, *lost: int) -> list[int]:
        """Wait until `hosts` hosts are voters, and none of the lost ones is. Return the voters."""
        found: list[int] = []

        def are_there() -> bool:
            names = (self.status() or {"coordinator": {"voters": []}})["coordinator"]["voters"]
            found[:] = [int(name[1]) for name in names]
            return len(found) == hosts and not {*found} & {*lost}

        self.look_until(are_there, f"{hosts} voters")
        return found

    def restart(self, host: int) -> None:
        """Start an agent again on a host whose agent has ended."""
        self.wait_exit([host])
        os.close(self.agents[host].pidfd)
        self.agents[host] = self.start(host)

    def release(self, count: int = 1) -> None:
        """Let `count` processes continue that wait for the test, now or later."""
        os.write(self._gate, bytes(count))

    def power_off(self, host: int) -> None:
        """Kill all of a host's processes at once."""
        self.agents[host].everything(signal.SIGKILL)

    def kill(self, rank: int) -> None:
        """Kill the process that holds the rank, according to the script's events."""
        os.kill(self.account.pids(rank)[-1], signal.SIGKILL)

    def pause(self, hosts: Sequence[int], timeouts: float) -> None:
        """Stop all processes of these hosts for `timeouts` node timeouts."""
        for host in hosts:
            self.agents[host].everything(signal.SIGSTOP)
        threading.Event().wait(timeouts * self.node_timeout_s)
        for host in hosts:
            self.agents[host].everything(signal.SIGCONT)

    def reset_connections(self, host: int) -> None:
        """Reset every connection of a host's agent to another agent, on both sides."""
        for port in ("sport", "dport"):
            words = ["ip", "netns", "exec", self.net.names[host], "ss", "-K", "-t", "state", "established"]
            done = subprocess.run([*words, port, "=", f":{PORT}"], capture_output=True, text=True, check=False)
            if done.returncode != 0 or done.stderr:
                pytest.skip(f"connections cannot be reset here: {done.stderr.strip()}")

    def host_of(self, rank: int) -> int:
        """Return the host whose process holds the rank, according to the script's events."""
        pid = self.account.pids(rank)[-1]
        return next(agent.host for agent in self.agents if pid in marked(agent.mark))

    def journal(self, folder: Path | None = None) -> list[dict[str, Any]]:
        """Return the decisions of the coordinator's journal."""
        _leader, *lines = ((folder or self.run_dir) / "journal.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def effects(self) -> list[dict[str, Any]]:
        """Return all orders of all coordinators."""
        journals = [path.parent for path in self.run_dir.rglob("journal.jsonl")]
        return [effect for folder in journals for line in self.journal(folder) for effect in line["effects"]]

    # --- what is promised ----------------------------------------------------------------------------------------

    def check_repaired(
        self, reference: States, lost: Sequence[int], hosts: Sequence[int], timeout_s: float = 120.0
    ) -> None:
        """Wait for the end of these hosts' agents. Assert every promise for a job that lost these ranks."""
        assert self.wait_exit(hosts, timeout_s) == [0] * len(hosts), self.told()
        self.account.check_same_as(reference)
        world_size = 1 + max(rank for rank, _ in reference)
        self.account.check_ranks(lost, world_size)
        self.account.check_steps_repeated(self.effects())
        for host in hosts:
            assert not marked(self.agents[host].mark), f"processes of host {host} outlived the job"

    # --- the end -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the job if it runs, and close all files."""
        left = {}
        for agent in self.agents:
            if agent.exit_code is None:
                agent.everything(signal.SIGCONT)
                if self._lines:  # bash alone would leave its agent
                    agent.everything(signal.SIGKILL)
                agent.process.kill()
                agent.exit_code = agent.process.wait()
            left |= wait_gone(agent.mark, 10)
            kill_marked(agent.mark)
            os.close(agent.pidfd)
        self._selector.close()
        for fd in (self._fifo, self._gate):
            os.close(fd)
        assert not left, f"processes that outlived their agent by 10 s: {left}"
