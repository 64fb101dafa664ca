"""The control socket and the run's record: what viewers see, and that they can hurt nothing."""

import json
import os
import socket
import stat

import pytest

from deadpool_run.coordinator.control import MAX_LINE_BYTES


@pytest.fixture
def job(cluster):
    started = cluster(script="family.py", nproc=2, spares=1, options=("--start-method", "spawn", "--max-restarts", "1"))
    for rank in (0, 1):
        started.wait_event("start", rank=rank)
    return started


@pytest.fixture
def connect(job):
    opened = []

    def start():
        opened.append(socket.socket(socket.AF_UNIX))
        opened[-1].settimeout(10)
        opened[-1].connect(str(job.run_dir / "control.sock"))
        return opened[-1]

    yield start
    for each in opened:
        each.close()


def ask(connection, request):
    connection.sendall((request if isinstance(request, bytes) else json.dumps(request).encode()) + b"\n")
    return receive(connection)


def receive(connection):
    answer = b""
    while not answer.endswith(b"\n"):
        data = connection.recv(1 << 16)
        if not data:
            return None
        answer += data
    return json.loads(answer.splitlines()[-1])


def is_cut_off(connection):
    try:
        for _ in range(4):
            connection.sendall(b"x" * MAX_LINE_BYTES)
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def test_only_the_user_can_reach_it(job):
    assert stat.S_IMODE((job.run_dir / "control.sock").stat().st_mode) == 0o600
    assert stat.S_IMODE((job.run_dir / "run.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(job.run_dir.stat().st_mode) == 0o700


def test_status(job, connect):
    status = ask(connect(), {"do": "status"})
    assert status["schema_version"] == 1
    assert status["run"]["pid"] == job.pid
    assert [rank["pid"] for rank in status["ranks"]] == [job.pid_of(rank) for rank in (0, 1)]
    assert {"activity", "step", "step_ms", "capture_ms", "snapshots"} <= status["ranks"][0].keys()
    assert len(status["spares"]) == 1
    assert status["committed"] is None


@pytest.mark.parametrize(
    ("request_", "part"),
    [
        (b"{", "a request: a JSON object"),
        (b"[" * 60000, "a request: a JSON object"),
        (b'{"do":"status","a":' + b"[" * 60000, "a request: a JSON object"),
        (b"[1]", "a JSON object"),
        (b"\xff", "a request: a JSON object"),
        ({"do": "dance"}, "unknown request"),
        ({}, "unknown request"),
        ({"do": "kill-rank"}, "unknown request"),
        ({"do": "kill-rank", "rank": "1"}, "unknown request"),
        ({"do": "kill-rank", "rank": 2}, "no rank 2"),
        ({"do": "kill-rank", "rank": -1}, "no rank -1"),
        ({"do": "kill-rank", "rank": 0, "how": "politely"}, "sigkill"),
        ({"do": "watch", "every_s": "often"}, "every_s"),
    ],
)
def test_what_cannot_be_done_is_said_and_hurts_nothing(connect, request_, part):
    connection = connect()
    assert part in ask(connection, request_)["error"]
    assert "ranks" in ask(connection, {"do": "status"})


def test_kill_rank_kills_that_rank(job, connect):
    pid = job.pid_of(1)
    answer = ask(connect(), {"do": "kill-rank", "rank": 1, "how": "sigsegv"})
    assert (answer["ok"], answer["pid"]) == (True, pid)
    job.wait_event("start", rank=1, restart=1)
    first = next(line for line in job.journal() if line.get("event", {}).get("type") == "WorkerExited")
    assert first["event"]["signal"] == 11


def test_a_watcher_is_told_of_changes_until_the_end(job, connect):
    connection = connect()
    seen = ask(connection, {"do": "watch", "every_s": 60})["phase"]
    ask(connect(), {"do": "kill-rank", "rank": 0})
    while (status := receive(connection)) is not None and status["restarts"] == 0:
        seen = status["phase"]
    assert seen
    assert status["restarts"] == 1
    assert ask(connect(), {"do": "stop"}) == {"ok": True}
    while receive(connection) is not None:
        pass
    assert job.wait_exit() == 1
    record = json.loads((job.run_dir / "run.json").read_text())
    assert (record["exit_code"], bool(record["reason"]), bool(record["ended"])) == (1, True, True)
    job.check_nothing_left()


def test_a_viewer_that_misbehaves_is_cut_off_alone(job, connect):
    endless, deaf, gone = connect(), connect(), connect()
    deaf.sendall(b'{"do": "watch", "every_s": 0.1}\n')
    gone.sendall(b'{"do": "watch", "every_s": 0.1}\n')
    gone.close()
    assert is_cut_off(endless)
    assert "ranks" in ask(connect(), {"do": "status"})
    os.kill(job.pid, 15)
    assert job.wait_exit() == 1
    job.check_nothing_left()
