"""The commands about runs, live and ended, on records as runs leave them."""

import json
import os
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
from kit.processes import ended_pid
from test_cli_app import deadpool, ours


def ago(**past):
    return (datetime.now(UTC) - timedelta(**past)).isoformat(timespec="milliseconds")


@pytest.fixture
def home(tmp_path):
    (tmp_path / "state" / "deadpool-run").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def run(home):
    """Leave the record of a run, and a file of its logs."""

    def make(name, *, run_id=None, ended=None, **parts):
        path = home / "state" / "deadpool-run" / name
        (path / "logs").mkdir(parents=True)
        (path / "logs" / "stdout.log").write_text("said\n")
        record = {
            "schema_version": 1,
            "run_id": run_id or name,
            "run_dir": str(path),
            "log_dir": str(path / "logs"),
            "pid": ended_pid(),
            "host": socket.gethostname(),
            "started": ago(hours=1),
            "ended": ended,
            "exit_code": None if ended is None else 1,
            "reason": None if ended is None else "rank 1 raised\nValueError",
            "world_size": 2,
            **parts,
        }
        (path / "run.json").write_text(json.dumps(record))
        return path

    return make


def test_runs_are_listed_with_their_ends(home, run):
    run("oldest", ended=ago(minutes=30), started=ago(hours=9))
    run("fine", ended=ago(minutes=3), exit_code=0, reason="every rank finished", started=ago(hours=3))
    run("killed", started=ago(hours=2))
    run("away", host="elsewhere", started=ago(hours=1))
    done = deadpool("ls", "--last", "3", env=ours(home))
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["RUN", "STATE", "STARTED", "RANKS", "STEP", "END"]
    assert [line.split()[:2] for line in lines] == [["away", "on"], ["killed", "killed"], ["fine", "done"]]
    assert " 3m" in lines[2]
    assert lines[2].endswith("s ago: every rank finished")
    assert done.stderr == "deadpool-run: 1 older run is not shown: add --last 4\n"
    objects = [json.loads(line) for line in deadpool("ls", "--json", env=ours(home)).stdout.splitlines()]
    assert [each["state"] for each in objects] == ["elsewhere", "killed", "ended", "ended"]
    assert objects[3]["reason"] == "rank 1 raised\nValueError"


def test_the_status_of_an_ended_run_says_when_and_why(home, run):
    path = run("night", ended=ago(minutes=5))
    for words in ("--run-id night", f"--run-dir {path}"):
        done = deadpool("status", *words.split(), env=ours(home))
        assert (done.returncode, done.stdout) == (4, "")
        assert "run night ended 5m" in done.stderr
        assert "with exit code 1: rank 1 raised ValueError\n" in done.stderr
        assert f"its records are in {path}; " in done.stderr
    of_any = deadpool("status", "--json", env=ours(home))
    assert "no live run below" in of_any.stderr
    assert "the last one, night, ended 5m" in of_any.stderr
    shown = json.loads(deadpool("status", "--json", "--run-id", "night", env=ours(home)).stdout)
    assert (shown["health"], shown["run"]["exit_code"]) == ("ended", 1)


def test_a_run_is_named_by_its_id_or_its_directory(home, run):
    run("job-1", run_id="job", ended=ago(minutes=50), started=ago(hours=2))
    run("job-2", run_id="job", ended=ago(minutes=5), started=ago(hours=1))
    assert "run job-2 ended" in deadpool("status", "--run-id", "job", env=ours(home)).stderr
    assert "run job-1 ended" in deadpool("status", "--run-id", "job-1", env=ours(home)).stderr
    assert "no run 'nope' below" in deadpool("status", "--run-id", "nope", env=ours(home)).stderr
    both = deadpool("status", "--run-id", "job", "--run-dir", "x", env=ours(home))
    assert (both.returncode, "exclude each other" in both.stderr) == (2, True)


def test_the_logs_of_a_run_are_found_after_its_directory_was_renamed(home, run):
    path = run("alpha", ended=ago(minutes=5))
    output = path / "logs" / "attempt_0" / "0" / "stdout.log"
    output.parent.mkdir(parents=True)
    output.touch()
    path.rename(path.with_name("alpha~1"))
    assert f"its logs are in {path}~1/logs; " in deadpool("status", "--run-id", "alpha~1", env=ours(home)).stderr


def test_only_ended_runs_are_removed_and_not_without_a_word(home, run):
    old, new = run("old", ended=ago(days=3), started=ago(days=4)), run("new", ended=ago(hours=1), started=ago(days=1))
    away = run("away", host="elsewhere")
    refused = deadpool("prune", env=ours(home))
    assert (refused.returncode, refused.stdout.splitlines()) == (2, [str(new), str(old)])
    assert "add --yes" in refused.stderr
    assert deadpool("prune", "--dry-run", env=ours(home)).returncode == 0
    assert all(path.exists() for path in (old, new, away))
    done = deadpool("prune", "--older-than", "2d", "--yes", env=ours(home))
    assert (done.returncode, done.stdout) == (0, f"{old}\n")
    assert [path.exists() for path in (old, new, away)] == [False, True, True]
    assert deadpool("prune", "--older-than", "soon", env=ours(home)).returncode == 2
    assert deadpool("prune", "--keep", "1", "--yes", env=ours(home)).stdout == ""
    assert deadpool("prune", "--yes", env=ours(home)).stdout == f"{new}\n"


@pytest.fixture
def logged(run):
    """A run with log files of two generations."""

    def make(**parts):
        path = run("logged", **parts)
        for where, text in {"0/0/stdout": "a", "0/1/stdout": "b", "0/1/stderr": "c", "1/1/stdout": "d\ne"}.items():
            file = path / "logs" / f"attempt_{where}.log"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return path

    return make


def test_logs_of_all_generations_are_shown(home, logged):
    logged(ended=ago(minutes=5))
    line = ("logs", "--run-id", "logged")
    shown = deadpool(*line, env=ours(home))
    assert shown.stdout.splitlines() == [
        "[0 stdout] a",
        "[1 stderr] c",
        "[1 stdout] b",
        "[1:1 stdout] d",
        "[1:1 stdout] e",
    ]
    assert deadpool(*line, "1", "--stream", "out", "-f", env=ours(home)).stdout.splitlines() == ["b", "d", "e"]
    absent = deadpool(*line, "7", env=ours(home))
    assert (absent.returncode, absent.stdout) == (1, "")
    assert absent.stderr == "deadpool-run: run logged has no local rank 7 on this machine\n  its local ranks are 0, 1\n"
    assert deadpool(*line, "--stream", "x", env=ours(home)).returncode == 2


def test_what_is_not_on_this_machine_is_refused_with_the_place(home, run):
    path = run("far", ended=ago(minutes=5), log_dir="/nowhere/logs")
    run("mute", ended=ago(minutes=5), log_dir=None)
    logs = deadpool("logs", "--run-id", "far", env=ours(home))
    assert (logs.returncode, logs.stderr.splitlines()) == (
        4,
        [
            "deadpool-run: run far has no log files on this machine (log directory /nowhere/logs)",
            "  run this on the machine of the rank, or start the run with --tee 3",
        ],
    )
    mute = deadpool("logs", "--run-id", "mute", env=ours(home)).stderr
    assert "run mute has no log files (log directory /dev/null)\n  start it with another --log-dir, and --tee 3" in mute
    for command in ("events", "report"):
        done = deadpool(command, "--run-id", "far", env=ours(home))
        first, last = done.stderr.splitlines()
        assert (done.returncode, first) == (4, f"deadpool-run: {path}: there is no journal on this machine")
        assert "run this on the leader's: `deadpool-run status` names it; `deadpool-run ls` lists" in last


def test_a_journal_is_told_in_words_with_times_of_day(home, run):
    path = run("told", ended=ago(minutes=5), started="2026-01-02T03:04:05+00:00")
    lines = [
        {"format": 4, "settings": {}, "state": None},
        {"now": 7.5, "event": {"type": "JobSubmitted", "node": "node"}, "effects": [{"type": "StartWorker"}]},
        {
            "now": 9.0,
            "event": {"type": "WorkerExited", "worker": 1, "code": None, "signal": 9},
            "effects": [{"type": "Announce", "what": "repairing", "reason": "rank 1\nfailed"}, {"type": "Novel"}],
        },
        {"dropped": 3, "state": {}},
        {
            "now": 9.5,
            "event": {"type": "WorkerHung", "worker": 2},
            "effects": [{"type": "ReportIncident", "incident": 1}],
        },
    ]
    (path / "journal.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"now": 9')
    told = deadpool("events", "--run-id", "told", env=ours(home, TZ="UTC"))
    assert told.stdout.splitlines() == [
        "03:04:05.000  the job begins on node node",
        "03:04:06.500  worker 1 was killed by SIGKILL",
        "03:04:06.500  repairing: rank 1 failed",
        "03:04:06.500  (3 entries are missing: the disk had stalled)",
        "03:04:07.000  worker 2 hangs: ?",
        "03:04:07.000  a repair ended; another version of deadpool-run wrote its details",
    ]
    objects = [
        json.loads(line)
        for line in deadpool("events", "--run-id", "told", "--json", env=ours(home)).stdout.splitlines()
    ]
    assert objects[0] | {"effects": []} == {
        "time": "2026-01-02T03:04:05.000+00:00",
        "texts": ["the job begins on node node"],
        **lines[1],
        "effects": [],
    }
    assert deadpool("events", "-f", "--run-id", "told", env=ours(home, TZ="UTC")).stdout == told.stdout


def test_faults_are_told_with_their_victims(home, run):
    path = run("faults", ended=ago(minutes=5), started="2026-01-02T03:04:05+00:00")
    events = [
        {"type": "KillRequested", "rank": 1, "how": "sigkill"},
        {"type": "KillRequested", "rank": -1, "how": "sigterm", "spare": 4},
        {"type": "SlowRequested", "rank": 0, "factor": 3.0, "for_s": 60.0},
        {"type": "AgentKillRequested", "node": "b"},
    ]
    lines = [{"format": 4, "settings": {}}, *({"now": 1.0, "event": event, "effects": []} for event in events)]
    (path / "journal.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    told = deadpool("events", "--run-id", "faults", env=ours(home)).stdout.splitlines()
    assert [line.partition("  ")[2] for line in told] == [
        "rank 1 gets sigkill",
        "spare worker 4 gets sigterm",
        "rank 0 is slowed 3.0 times for 60.0 s",
        "the agent of node b gets sigkill",
    ]


def test_events_of_a_leader_that_comes_later_are_followed(home, run):
    path = run("live", pid=os.getpid())

    def write(folder, node):
        folder.mkdir(exist_ok=True)
        lines = [{"format": 4, "settings": {}}, {"now": 1.0, "event": {"type": "NodeJoined", "node": node}}]
        (folder / "journal.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")

    command = [sys.executable, "-m", "deadpool_run", "events", "--follow", "--run-id", "live"]
    with subprocess.Popen(
        command, env=ours(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as follower:
        write(path, "a")
        assert follower.stdout.readline().endswith("node a joined\n")
        write(path / "node-b", "b")
        assert follower.stdout.readline().endswith("node b joined\n")
        run_record = json.loads((path / "run.json").read_text())
        (path / "run.json").write_text(json.dumps(run_record | {"ended": ago(seconds=1), "exit_code": 0}))
        assert follower.wait(30) == 0
        assert follower.stdout.read() == ""


def test_the_parts_of_a_journal_are_shown_in_their_order_with_one_clock(home, run):
    path = run("long", ended=ago(minutes=5))

    def write(name, written_at, began, now, node):
        lines = [
            {"format": 4, "settings": {}, "began": began},
            {"now": now, "event": {"type": "NodeJoined", "node": node}},
        ]
        (path / name).write_text("\n".join(map(json.dumps, lines)) + "\n")
        os.utime(path / name, (written_at, written_at))

    write("journal-3.jsonl", 3e9, None, 900.0, "c")
    write("journal-2.jsonl", 2e9, 10.0, 70.0, "b")
    write("journal-before-term-4.jsonl", 1e9, None, 10.0, "a")  # renamed after that
    told = [
        json.loads(line)
        for line in deadpool("events", "--json", "--run-id", "long", env=ours(home)).stdout.splitlines()
    ]
    assert [each["texts"] for each in told] == [[f"node {node} joined"] for node in "abc"]
    first, second, _ = (datetime.fromisoformat(each["time"]) for each in told)
    assert (second - first).total_seconds() == 60


def test_waiting_for_a_run_that_has_ended_gives_its_exit_code(home, run):
    run("ended", ended=ago(minutes=5), exit_code=7)
    run("killed")
    run("away", host="elsewhere")
    done = deadpool("wait", "--run-id", "ended", env=ours(home))
    assert (done.returncode, done.stdout) == (7, "run ended ended with exit code 7: rank 1 raised ValueError\n")
    killed = deadpool("wait", "--run-id", "killed", env=ours(home))
    assert (killed.returncode, "its exit code is not known" in killed.stderr) == (1, True)
    away = deadpool("wait", "--run-id", "away", env=ours(home))
    assert (away.returncode, "led by a process on elsewhere" in away.stderr) == (4, True)
    assert deadpool("wait", "--timeout", "soon", env=ours(home)).returncode == 2


def test_a_live_run_is_waited_for_and_stopped(home):
    environment = {**os.environ, **ours(home)}
    line = [sys.executable, "-m", "deadpool_run", "--run-id", "live", "--no-python", "/bin/sh", "sleep.sh"]
    (home / "sleep.sh").write_text("echo up; exec sleep 600\n")
    with subprocess.Popen(line, env=environment, cwd=home, stdout=subprocess.PIPE, text=True) as launched:
        try:
            assert launched.stdout.readline() == "up\n"
            late = deadpool("wait", "--run-id", "live", "--timeout", "100ms", env=ours(home))
            assert (late.returncode, late.stderr) == (124, "deadpool-run: run live has not ended within 100ms\n")
            stopped = deadpool("stop", "--run-id", "live", "--wait", env=ours(home))
            assert (stopped.returncode, stopped.stdout) == (0, "run live is stopping\n"), stopped.stderr
            assert launched.wait(30) == 1
        finally:
            launched.kill()
            launched.stdout.close()
    assert deadpool("wait", env=ours(home)).returncode == 1
    assert "the job ended with exit code 1: asked to stop" in deadpool("events", env=ours(home)).stdout


def test_a_run_id_is_used_again_after_its_run_has_ended(home):
    line = ("--run-id", "alpha", "--no-python", "/bin/true")
    first, second = (deadpool(*line, cwd=home, env=ours(home)) for _ in range(2))
    folder = home / "state" / "deadpool-run"
    assert (first.returncode, second.returncode) == (0, 0)
    assert f"are in {folder / 'alpha~1'} now" in second.stderr
    assert {path.name for path in folder.iterdir()} == {"alpha", "alpha~1"}
