"""A terminal, pipe or disk that accepts nothing more costs lines of the log, and never the job or its leadership."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.processes import MARK, kill_marked, wait_gone

BOUND_S = 60
LINES = 600_000


class Full:
    """A pipe that is full from the beginning."""

    def __init__(self):
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        self.filler = os.write(self.writer, bytes(1 << 20))
        os.set_blocking(self.writer, True)

    def text(self):
        """Return all that was written after the filler, until its last holder is gone."""
        os.close(self.writer)
        with os.fdopen(self.reader, "rb") as file:
            return file.read()[self.filler :].decode()


@pytest.fixture
def start(tmp_path):
    mark, agents = tmp_path.name, []

    def agent(name, *words, stderr):
        command = [sys.executable, "-m", "deadpool_run", "--no-config", "--run-dir", str(tmp_path / name), *words]
        environment = {**os.environ, MARK: mark, "DEADPOOL_TOKEN": "of-this-test-only-0123456789abcdef0123456789"}
        agents.append(
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=environment
            )
        )
        return agents[-1]

    yield agent
    for each in agents:
        each.kill()
        each.wait()
    left = wait_gone(mark, 10)
    kill_marked(mark)
    assert not left


def status(run_dir):
    command = [sys.executable, "-m", "deadpool_run", "status", "--json", "--run-dir", str(run_dir)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=BOUND_S, check=False)
    return json.loads(found.stdout)


def gate(path):
    """Return a FIFO that a script of this test reads until somebody writes."""
    os.mkfifo(path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


def told(fifo):
    assert select.select([fifo], [], [], BOUND_S)[0], "the script got no further"
    return os.read(fifo, 100)


def test_a_paused_pager_stalls_no_worker_and_no_viewer(start, tmp_path):
    console, news, release = Full(), gate(tmp_path / "news"), gate(tmp_path / "release")
    script = f"seq {LINES} >&2; echo told > {tmp_path}/news; read word < {tmp_path}/release"
    logs = ("--tee", "2", "--log-dir", str(tmp_path / "logs"))
    job = start("run", "--nproc-per-node", "1", *logs, "--no-python", "/bin/sh", "-c", script, stderr=console.writer)
    assert told(news) == b"told\n"
    assert status(tmp_path / "run")["dropped_lines"]["console"] > 0
    os.write(release, b"go\n")
    shown = console.text().splitlines()
    assert job.wait(BOUND_S) == 0
    assert sum("lines dropped" in line for line in shown) >= 1
    (log,) = Path(tmp_path / "logs").rglob("stderr.log")
    assert log.read_text().split() == [str(number + 1) for number in range(LINES)]
    for fd in (news, release):
        os.close(fd)


def test_a_leader_whose_console_has_stalled_keeps_its_leadership(start, tmp_path):
    """Its node loses the worker. The line about that cannot be written, and the other node goes on following."""
    console, news, release = Full(), gate(tmp_path / "news"), gate(tmp_path / "release")
    script = f"echo $RANK $TORCHELASTIC_RESTART_COUNT $$$$ > {tmp_path}/news; read word < {tmp_path}/release"
    program = ("--no-python", "/bin/sh", "-c", script)
    meeting = ("--nnodes", "2", "--rdzv-endpoint", str(tmp_path / "meeting"))
    words = ("--nproc-per-node", "1", "--max-restarts", "1", *meeting)
    first = start("a", *words, "--node-name", "a", *program, stderr=console.writer)
    started, deadline = [], time.monotonic() + BOUND_S
    while not (tmp_path / "a" / "leader.json").exists():
        assert time.monotonic() < deadline
        os.sched_yield()
    second = start("b", *words, "--node-name", "b", *program, stderr=subprocess.DEVNULL)
    while len(started) < 2:
        started += told(news).decode().splitlines()
    pids = {int(line.split()[0]): int(line.split()[2]) for line in started}
    os.kill(pids[0], 9)
    again = []
    while len(again) < 2:
        again += told(news).decode().splitlines()
    assert all(line.split()[1] == "1" for line in again)
    coordinator = status(tmp_path / "a")["coordinator"]
    assert (coordinator["node"], coordinator["term"]) == ("a", 0)
    os.write(release, b"go\ngo\n")
    assert "starting the world again" in console.text()
    assert first.wait(BOUND_S) == second.wait(BOUND_S) == 0
    for fd in (news, release):
        os.close(fd)
