"""The nursery: imports torch once, then forks every process of the job. Runs as `python -u -c COMMAND FD AGENT_PID`.

Single-threaded, no CUDA, no sockets but the agent's. Requests and answers are JSON packets on a SOCK_SEQPACKET pair:

    {"do": "prepare", "modules": [...]}                    -> {"prepared": true} or {"failed": "why"}
    {"do": "fork", "id": n, "kind": "worker"|"store"} and  -> {"id": n, "pid": p} or {"id": n, "failed": "why"}
        descriptors, the arguments of the kind's `main`
    {"do": "adopt"|"reaped", "pid": p}                        no answer

A child is forked twice, so that the agent, a child subreaper, is its parent. When the agent goes away the nursery ends
the process groups of all children that the agent has not told it were reaped (the parent-death signal reaches a worker,
but not what the worker has started), and then whatever still carries the job's mark in its environment, because it left
its group.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

COMMAND = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "from deadpool_run.agent.nursery_main import main; entry = main(); entry and entry()"
)
"""Keeps modules of the working directory from being taken for the library's (what `-P` is for, but children inherit that
as `sys.flags.safe_path`), and calls what a child is to become from the bottom of the stack, as if started by itself."""

MARK = "DEADPOOL_MARK"
"""Variable with a value of the job's own, inherited by all that its workers start."""

_PR_SET_PDEATHSIG = 1
_PID = struct.Struct("i")
MAX_PACKET_BYTES = 64 << 10

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_ENTRIES = {"worker": "deadpool_run.worker.bootstrap", "store": "deadpool_run.worker.store_main"}
_STORE_COMMAND = "import sys; from deadpool_run.worker import store_main; store_main.main(*map(int, sys.argv[1:]))"
_MAX_FDS = 4


class _Nursery:
    """The serving loop. `serve` returns in the nursery (None) and, by way of `_fork`, in each child (what it is)."""

    def __init__(self, agent: socket.socket, agent_pid: int) -> None:
        self._agent = agent
        self._agent_pid = agent_pid
        self._groups: set[int] = set()

    def serve(self) -> tuple[str, list[int]] | None:
        while True:
            packet, fds = self._receive()
            if not packet:
                self._end_groups()
                _end_marked(f"{MARK}={os.environ[MARK]}".encode())
                return None
            request: dict[str, Any] = json.loads(packet)
            match request["do"]:
                case "prepare":
                    self._answer(self._prepare(request["modules"]))
                case "adopt":
                    self._groups.add(request["pid"])
                case "reaped":
                    self._groups.discard(request["pid"])
                case "fork":
                    if (answer := self._fork()) is None:
                        return request["kind"], fds
                    for fd in fds:
                        os.close(fd)
                    self._answer({"id": request["id"], **answer})

    def _receive(self) -> tuple[bytes, list[int]]:
        try:
            packet, fds, _, _ = socket.recv_fds(self._agent, MAX_PACKET_BYTES, _MAX_FDS)
        except ConnectionResetError:  # the agent went away and left an answer unread
            return b"", []
        return packet, fds

    def _answer(self, answer: Mapping[str, Any]) -> None:
        try:
            self._agent.sendall(json.dumps(answer).encode())
        except (BrokenPipeError, ConnectionResetError):
            return  # the next read says that the agent is gone

    def _prepare(self, modules: list[str]) -> Mapping[str, Any]:
        if not self._groups:  # nobody's group to end: an import need not outlive the agent
            die_with_parent(self._agent_pid)
        answer = self._import(modules)
        _set_death_signal(0)
        return answer

    def _import(self, modules: list[str]) -> Mapping[str, Any]:
        gc.disable()  # what is imported stays: looking for garbage among it is a fifth of the time
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
        gc.collect()
        gc.enable()
        gc.freeze()  # so that the children's collector does not write to, and thereby copy, what they share
        return {"prepared": True}

    def _fork(self) -> Mapping[str, Any] | None:
        """Return the answer; in the child, None."""
        pid_reader, pid_writer = os.pipe()
        go_reader, go_writer = os.pipe()
        try:
            intermediate = os.fork()
        except OSError as error:
            for fd in (pid_reader, pid_writer, go_reader, go_writer):
                os.close(fd)
            return {"failed": f"fork: {error.strerror}"}
        if intermediate == 0:
            os.close(pid_reader)
            os.close(go_writer)
            try:
                if os.fork() != 0:
                    os._exit(0)
            except OSError:
                os._exit(1)
            self._become_child(pid_writer, go_reader)
            return None
        os.close(pid_writer)
        os.close(go_reader)
        answered = os.read(pid_reader, _PID.size)
        os.waitpid(intermediate, 0)
        os.close(pid_reader)
        os.close(go_writer)  # the intermediate was reaped, so the child's parent is the agent now: let it go on
        if len(answered) != _PID.size:
            return {"failed": "the child died at its start"}
        (pid,) = _PID.unpack(answered)
        self._groups.add(pid)
        return {"pid": pid}

    def _become_child(self, pid_writer: int, go_reader: int) -> None:
        os.setsid()
        self._agent.close()
        os.write(pid_writer, _PID.pack(os.getpid()))
        os.close(pid_writer)
        os.read(go_reader, 1)
        os.close(go_reader)
        die_with_parent(self._agent_pid)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job was born with it ignored
        for number in _PASSED_ON:  # under nohup, say; the agent passes them on
            signal.signal(number, signal.SIG_DFL)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # until the script says what they mean
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # python's own generator reseeds itself after a fork; this one does not

    def _end_groups(self) -> None:
        for group in self._groups:
            try:
                os.killpg(group, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent ends (PR_SET_PDEATHSIG, prctl(2)); end now if it has."""
    _set_death_signal(signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def _end_marked(mark: bytes) -> None:
    """SIGKILL every process of ours that has the mark in its environment, until a look at all finds no other."""
    killed = {os.getpid()}
    while found := {pid for pid in _pids() if _carries(pid, mark)} - killed:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)  # from here on it cannot fork, so the loop ends
        killed |= found


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _carries(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return False


def _ignore_signals() -> None:
    """Leave signals to the agent and the workers: Slurm's reach every process of a step, whatever its session."""
    for number in (*_PASSED_ON, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _set_death_signal(number: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def _enter(kind: str, fds: list[int]) -> None:
    if kind == "store":
        _ignore_signals()
    if kind == "store" and "torch" not in sys.modules:  # keep this cheap process cheap: a fork of it must not import
        for fd in fds:
            os.set_inheritable(fd, True)
        os.execv(sys.executable, [sys.executable, "-P", "-c", _STORE_COMMAND, *map(str, fds)])  # noqa: S606 - our own
    sys.path.insert(0, "")  # where the interpreter puts the script's folder; the bootstrap replaces it
    importlib.import_module(_ENTRIES[kind]).main(*fds)


def main() -> Callable[[], None] | None:
    """Serve until the agent goes away. Returns None in the nursery; in a child, what it is to do."""
    agent_fd, agent_pid = (int(word) for word in sys.argv[1:3])
    agent = socket.socket(fileno=agent_fd)
    agent.set_inheritable(False)
    _ignore_signals()
    os.environ["OPENBLAS_NUM_THREADS"] = (
        "1"  # else its threads start with the import; a worker's environment is replaced
    )
    child = _Nursery(agent, agent_pid).serve()
    return None if child is None else partial(_enter, *child)
