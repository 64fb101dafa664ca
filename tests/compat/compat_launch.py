"""One command line under torchrun and under deadpool-run, and everything that is to be seen of each."""

import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from compat_cases import Case

SCRIPTS = Path(__file__).parent / "scripts"
SERVER = Path(__file__).parent / "compat_torchrun.py"
PACKAGE = Path(__file__).parents[2]
TIMEOUT_S = 100.0
END_TIMEOUT_S = 10.0
MARK = "probe:"


class TorchrunServer:
    """A process that has imported torchrun and forks it."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout.readline() == "ready\n"

    def ask(self, order):
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(END_TIMEOUT_S)


@dataclass
class Agent:
    """One launcher that runs."""

    pid: int
    wait: Callable[[], int]
    home: Path
    code: int | None = None
    pidfd: int = field(init=False)

    def __post_init__(self):
        self.pidfd = os.pidfd_open(self.pid)

    def close(self):
        """End it and what it has started: politely, as a torchrun that is killed leaves its workers behind."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self.code is None:
                os.kill(self.pid, number)
                if select.select([self.pidfd], [], [], END_TIMEOUT_S)[0]:
                    self.code = self.wait()
        os.close(self.pidfd)


@dataclass(frozen=True)
class Launcher:
    """`torchrun`, by itself or of a server; or `deadpool-run`."""

    name: str
    server: TorchrunServer | None = None

    def start(self, case, words, env, home):
        streams = {name: home / name for name in ("stdout", "stderr")}
        if self.server is not None:
            paths = {name: str(path) for name, path in streams.items()}
            order = {"argv": words, "env": env, "cwd": str(SCRIPTS), "module": case.module, **paths}
            pid = self.server.ask(order)
            return Agent(pid, lambda: self.server.ask({"wait": pid}), home)
        command = [sys.executable, "-m", "deadpool_run" if self.name == "ours" else case.module, *words]
        with streams["stdout"].open("a") as out, streams["stderr"].open("a") as err:
            process = subprocess.Popen(command, cwd=SCRIPTS, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        return Agent(process.pid, process.wait, home)


def free_port():
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def environment(case, home):
    """Return what a launcher inherits: nothing of this process's but what finds the interpreter and the package."""
    env = {
        "HOME": str(home),
        "LANG": "C.UTF-8",
        "PATH": os.environ["PATH"],
        "PROBE_DIR": str(home),
        "PYTHONPATH": os.pathsep.join((str(PACKAGE), str(SCRIPTS))),
        "TMPDIR": str(home / "tmp"),
        "XDG_STATE_HOME": str(home / "state"),
        "DEADPOOL_NO_CONFIG": "1",
        "DEADPOOL_NO_SLURM": "1",
    }
    places = {"{home}": str(home), "{python}": sys.executable}
    return env | {name: _replace(value, places) for name, value in case.env.items()}


def observe(case: Case, launcher: Launcher, home: Path) -> dict:
    """Run the case; return what was seen by its path, with what no two runs have in common replaced."""
    (home / "tmp").mkdir(parents=True)
    for fifo in ("events", "go"):
        os.mkfifo(home / fifo)
    places = {"{port}": str(free_port()), "{home}": str(home), "{scripts}": str(SCRIPTS), "{python}": sys.executable}
    with ExitStack() as stack:
        fifos = [os.open(home / name, os.O_RDWR | os.O_NONBLOCK) for name in ("events", "go")]
        for fd in fifos:
            stack.callback(os.close, fd)
        agents = []
        for node in range(case.agents):
            own = home / f"node{node}"
            own.mkdir()
            mine = {**places, "{log}": str(own / "log"), "{node}": str(node)}
            words = [_replace(word, mine) for word in shlex.split(case.line)]
            agents.append(launcher.start(case, words, environment(case, home), own))
            stack.callback(agents[-1].close)
        _attend(case, agents, *fifos)
        return dict(flat(_seen(case, agents, home)))


def _attend(case, agents, events, go):
    """Let ranks go on once all are up; wait for every launcher's end."""
    up = 0
    due = time.monotonic() + TIMEOUT_S
    while waiting := [agent for agent in agents if agent.code is None]:
        left = max(0.0, due - time.monotonic())
        readable, _, _ = select.select([events, *(agent.pidfd for agent in waiting)], [], [], left)
        assert readable, f"still running after {TIMEOUT_S} s: {[(a.home / 'stderr').read_text() for a in waiting]}"
        for agent in waiting:
            if agent.pidfd in readable:
                agent.code = agent.wait()
        if events in readable:
            up += len(os.read(events, 1 << 16))
            if case.world and up >= case.world:
                up -= case.world
                os.write(go, b"." * case.world)
                if case.signal:
                    for agent in agents:
                        os.kill(agent.pid, getattr(signal, case.signal))


def _seen(case, agents, home):
    nodes, roots = [], []
    for agent in agents:
        found = sorted((agent.home / "log").glob("*")) or [
            *sorted(home.glob("tmp/torchelastic_*/*")),
            *sorted(home.glob("state/deadpool-run/*/logs/*")),
        ]
        roots += found
        nodes.append(
            {
                "tree": {
                    path.relative_to(root).as_posix(): _content(path) for root in found for path in root.rglob("*")
                },
                "tree's name": [root.name[: -len("_12345678")] for root in found],
                "stdout": _lines(agent.home / "stdout"),
                "stderr": _lines(agent.home / "stderr"),
            }
        )
    if case.any_order:
        nodes.sort(key=lambda node: (node["stdout"], str(node["tree"])))
    own = home / "own.json"
    seen = {
        "exit": [agent.code for agent in agents],
        "notes": sorted(path.name for path in home.glob("note-*")),
        "workers": {
            path.stem.removeprefix("given-"): json.loads(path.read_text()) for path in home.glob("given-*.json")
        },
        "nodes": {str(node): told for node, told in enumerate(nodes)},
        "own error file": _content(own) if own.exists() else None,
    }
    places = {str(root): "<logs>" for root in roots} | {str(home): "<home>", str(SCRIPTS): "<scripts>"}
    places |= {'File "probe.py"': 'File "<scripts>/probe.py"'}  # in tracebacks
    return _clean(seen, places)


def _content(path):
    if path.is_dir():
        return "a directory"
    text = path.read_text()
    if path.suffix != ".json":
        return sorted(text.splitlines(keepends=True)) if path.name.startswith("filtered") else text
    error = json.loads(text)
    extra = error.get("message", {}).get("extraInfo", {})
    extra["timestamp"] = "<seconds>" if re.fullmatch(r"[0-9]{10}", extra.get("timestamp", "")) else "<no seconds>"
    return error


def _lines(path):
    """Return a console's lines that workers have written; what launchers say themselves is another matter.

    torchrun shows the traceback of a recorded exception again, indented, in its table of failures.
    """
    lines = path.read_text().split("\n")
    return sorted(line for line in lines if MARK in line and not line.startswith(("deadpool-run:", "  ")))


def _replace(text, places):
    for place, value in places.items():
        text = text.replace(place, value)
    return text


def _clean(value, places):
    if isinstance(value, dict):
        return {key: _clean(each, places) for key, each in value.items()}
    if isinstance(value, list):
        return [_clean(each, places) for each in value]
    return _replace(value, places) if isinstance(value, str) else value


def flat(value, path=""):
    """Yield a path such as `workers/0-0/env/RANK` and the value there, for each value."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from flat(each, f"{path}/{key}" if path else key)
    else:
        yield path, value
