"""The fork server: imports torch once, then forks every process of the job. Runs as `python -u -c COMMAND FD AGENT_PID`.

It has one thread, no CUDA, and only the agent's socket. Requests and answers are JSON packets on a SOCK_SEQPACKET pair:

    {"do": "prepare", "modules": [...]}                    -> {"prepared": true} or {"failed": "why"}
    {"do": "fork", "id": n, "kind": "worker"|"store"|"checkpointer"} and  -> {"id": n, "pid": p} or {"id": n, "failed": "why"}
        descriptors, the arguments of the kind's `main`; those that are sent together are made side by side
    {"do": "adopt", "pids": [...]}, {"do": "reaped", "pid": p}                  no answer
    {"do": "witness", "node": id, "run": id, "token": hex, "agents": [[address, port]...]} no answer

A child is forked twice, so that its parent is the agent, a child subreaper. Several children are forked at once, because
a fork of a process that has imported torch takes 15 ms, and its end as long. When the agent is gone, the fork server ends the
process groups of all children that the agent did not report as reaped: the parent-death signal reaches a worker, but not
its children. Then it ends the processes that left their group, which have the job's mark in their environment.
At last it tells other agents, as a witness, that all have ended, so that those need not wait for a timeout.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deadpool_run.agent.processes import marked
from deadpool_run.wire import descriptors

COMMAND = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "from deadpool_run.agent.processes.forkserver_main import main; entry = main(); entry and entry()"
)
"""Removes the working directory from the path. Children would inherit `-P` as `sys.flags.safe_path`. A child's task starts at
the bottom of the stack, as in a process of its own."""

MARK = "DEADPOOL_MARK"
"""Variable with the job's own value, inherited by every descendant of its workers."""

_PR_SET_PDEATHSIG = 1
_PID = struct.Struct("i")
MAX_PACKET_BYTES = 64 << 10

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_SERVICES = {"store": "deadpool_run.store.main", "checkpointer": "deadpool_run.worker.checkpoint.main"}
"""Processes that serve the agent and run no user code."""
_ENTRIES = {"worker": "deadpool_run.worker.process.bootstrap", **_SERVICES}
_SERVICE_COMMAND = "import sys; from {} import main; main(*map(int, sys.argv[1:]))"
_MAX_FDS = 4
_EXPENDABLE, _MAX_SCORE = 500, 1000
_TELL_S = 1.0
"""Limit for telling one agent."""


@dataclass(frozen=True, slots=True)
class _Request:
    """One packet of the agent, with its descriptors."""

    body: Mapping[str, Any]
    fds: list[int]


@dataclass(frozen=True, slots=True)
class _Birth:
    """A process being forked, with two pipes: one brings its pid, and it waits until the other one is closed."""

    number: int
    """The order's."""
    intermediate: int
    pid_reader: int
    go_writer: int


class _ForkServer:
    """The serving loop. `serve` returns None in the fork server, and in each child its order."""

    def __init__(self, agent: socket.socket, agent_pid: int) -> None:
        self._agent = agent
        self._agent_pid = agent_pid
        self._groups: set[int] = set()
        self._held: _Request | None = None
        self._witness: Mapping[str, Any] | None = None

    def serve(self) -> _Request | None:
        while (request := self._take()) is not None:
            body = request.body
            match body["do"]:
                case "prepare":
                    self._answer(self._prepare(body["modules"]))
                case "adopt":
                    self._groups.update(body["pids"])
                case "witness":
                    self._witness = body
                case "reaped":
                    self._groups.discard(body["pid"])
                case "fork":
                    if (mine := self._fork([request, *self._further_orders()])) is not None:
                        return mine
        self._end_groups()
        mark = f"{MARK}={os.environ[MARK]}".encode()
        marked.end(mark)
        if self._witness is not None and self._witness["agents"] and marked.have_ended(mark):
            _testify(self._witness)
        return None

    def _further_orders(self) -> Iterator[_Request]:
        """Take further fork requests that have arrived."""
        while select.select([self._agent], [], [], 0)[0] and (request := self._take()) is not None:
            if request.body["do"] != "fork":
                self._held = request
                return
            yield request

    def _take(self) -> _Request | None:
        """Return the next request; None if the agent is gone."""
        if (held := self._held) is not None:
            self._held = None
            return held
        try:
            packet, fds = descriptors.receive(self._agent, MAX_PACKET_BYTES, _MAX_FDS)
        except ConnectionResetError:  # the agent went away and left an answer unread
            return None
        return _Request(json.loads(packet), fds) if packet else None

    def _answer(self, answer: Mapping[str, Any]) -> None:
        try:
            self._agent.sendall(json.dumps(answer).encode())
        except (BrokenPipeError, ConnectionResetError):
            return  # the next read finds that the agent is gone

    def _prepare(self, modules: list[str]) -> Mapping[str, Any]:
        if not self._groups:  # there is nothing to end after the agent, so an import may die with it
            die_with_parent(self._agent_pid)
        answer = self._import(modules)
        _set_death_signal(0)
        return answer

    def _import(self, modules: list[str]) -> Mapping[str, Any]:
        gc.disable()  # imported modules stay: collecting garbage among them takes a fifth of the time
        for name in modules:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001 - whatever a module raises, the answer is its reason
                return {"failed": f"cannot import {name}: {type(error).__name__}: {error}"}
        threads = list(Path("/proc/self/task").iterdir())
        if len(threads) != 1:
            return {
                "failed": f"importing {', '.join(modules)} started {len(threads) - 1} threads, which a fork would lose"
            }
        gc.enable()
        gc.freeze()  # so that the children's collector does not write to, and thereby copy, shared memory
        if "triton" in sys.modules:
            atexit.register(gc.unfreeze)  # nanobind calls everything leaked that the last collection leaves out
        return {"prepared": True}

    def _fork(self, orders: Sequence[_Request]) -> _Request | None:
        """Fork all of them at the same time, and answer each order; in each child, return its order."""
        births: list[_Birth] = []
        for order in orders:
            pid_reader, pid_writer = os.pipe()
            go_reader, go_writer = os.pipe()
            try:
                intermediate = os.fork()
            except OSError as error:
                for fd in (pid_reader, pid_writer, go_reader, go_writer):
                    os.close(fd)
                self._answer({"id": order.body["id"], "failed": f"fork: {error.strerror}"})
                continue
            births.append(_Birth(order.body["id"], intermediate, pid_reader, go_writer))
            if intermediate == 0 and _fork_again():
                self._forget(births, [other for other in orders if other is not order])
                self._become_child(pid_writer, go_reader)
                return order
            os.close(pid_writer)
            os.close(go_reader)
        for birth in births:
            self._answer({"id": birth.number, **self._see_born(birth)})
        self._forget([], orders)
        return None

    def _see_born(self, birth: _Birth) -> Mapping[str, Any]:
        answered = os.read(birth.pid_reader, _PID.size)
        os.waitpid(birth.intermediate, 0)
        os.close(birth.pid_reader)
        os.close(birth.go_writer)  # lets the child continue: its parent is the agent, as the intermediate was reaped
        if len(answered) != _PID.size:
            return {"failed": "the child died at its start"}
        (pid,) = _PID.unpack(answered)
        self._groups.add(pid)
        return {"pid": pid}

    def _forget(self, births: Sequence[_Birth], orders: Sequence[_Request]) -> None:
        """Close descriptors of other processes: a pipe or socket ends only when no other process holds it."""
        for birth in births:
            os.close(birth.pid_reader)
            os.close(birth.go_writer)
        for order in orders:
            for fd in order.fds:
                os.close(fd)

    def _become_child(self, pid_writer: int, go_reader: int) -> None:
        os.setsid()
        self._agent.close()
        os.write(pid_writer, _PID.pack(os.getpid()))
        os.close(pid_writer)
        os.read(go_reader, 1)
        os.close(go_reader)
        die_with_parent(self._agent_pid)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in background jobs
        for number in _PASSED_ON:  # nohup ignores SIGHUP; the agent passes them on
            signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # until the script sets a handler
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # python's own generator reseeds itself after a fork; this one does not

    def _end_groups(self) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


def _fork_again() -> bool:
    """Return True in the child; the parent, an intermediate, ends."""
    try:
        if os.fork() == 0:
            return True
    except OSError:
        os._exit(1)
    os._exit(0)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (PR_SET_PDEATHSIG, prctl(2)); end now if it has."""
    _set_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _testify(witness: Mapping[str, Any]) -> None:
    """Tell other agents that this one and its workers have ended. An agent that cannot be told waits for its timeout."""
    from deadpool_run.core.leadership.electorate import AgentEnded  # noqa: PLC0415
    from deadpool_run.transport import handshake  # noqa: PLC0415 - not before: it keeps the fork server small
    from deadpool_run.wire import peers  # noqa: PLC0415
    from deadpool_run.wire.auth import ConnectionRole, Credentials, GreetingRefusedError  # noqa: PLC0415

    credentials = Credentials(bytes.fromhex(witness["token"]), witness["node"], witness["run"])
    frame = peers.encode(AgentEnded(witness["node"]))
    for address, port in witness["agents"]:
        with (
            contextlib.suppress(OSError, GreetingRefusedError),
            handshake.dial(address, port, ConnectionRole.VOTE, credentials, _TELL_S) as connection,
        ):
            connection.send(frame)


def _ignore_signals() -> None:
    """Leave signals to the agent and the workers: Slurm's reach every process of a step, whatever its session."""
    for number in (*_PASSED_ON, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _be_ended_first() -> None:
    """Have the kernel end this process before the agent if memory runs out (proc(5), oom_score_adj): it can be replaced."""
    score = Path("/proc/self/oom_score_adj")
    with contextlib.suppress(OSError, ValueError):  # kept from us: the kernel then ends the largest process
        score.write_text(str(min(_MAX_SCORE, int(score.read_text(encoding="ascii")) + _EXPENDABLE)), encoding="ascii")


def _set_death_signal(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _enter(order: _Request) -> None:
    kind, fds = order.body["kind"], order.fds
    if kind != "store":  # without it no rank trains
        _be_ended_first()
    if kind in _SERVICES:
        _ignore_signals()
    if kind in _SERVICES and "torch" not in sys.modules:  # a fork of this small process must not import torch
        for fd in fds:
            os.set_inheritable(fd, True)
        command = _SERVICE_COMMAND.format(_SERVICES[kind])
        os.execv(sys.executable, [sys.executable, "-P", "-c", command, *map(str, fds)])  # noqa: S606 - our own
    sys.path.insert(0, "")  # where the interpreter puts the script's folder; the bootstrap replaces it
    importlib.import_module(_ENTRIES[kind]).main(*fds)


def main() -> Callable[[], None] | None:
    """Serve until the agent goes away. Returns None in the fork server, and in a child its task."""
    agent_fd, agent_pid, open_files = map(int, sys.argv[1:4])
    resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    agent = socket.socket(fileno=agent_fd)
    agent.set_inheritable(False)
    _ignore_signals()
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # else the import starts threads; a worker's environment is replaced
    order = _ForkServer(agent, agent_pid).serve()
    return None if order is None else partial(_enter, order)
