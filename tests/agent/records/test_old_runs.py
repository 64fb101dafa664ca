"""`--keep-runs` removes runs that have ended, and nothing else."""

import json
import os
import socket

import pytest
from kit.processes import ended_pid

from deadpool_run.agent.records.old_runs import remove, set_aside

HERE = socket.gethostname()


@pytest.fixture
def run(tmp_path):
    def make(name, *, started="2026-01-01", ended="2026-01-02", host=HERE, pid=None, at="", **more):
        folder = tmp_path / name / at
        folder.mkdir(parents=True, exist_ok=True)
        record = {
            "schema_version": 1,
            "run_id": name,
            "host": host,
            "pid": ended_pid() if pid is None else pid,
            "started": started,
            "ended": ended,
            **more,
        }
        (folder / "run.json").write_text(json.dumps(record))
        (folder / "journal.jsonl").write_text("")
        (folder / "logs" / "deep").mkdir(parents=True)
        return tmp_path / name

    return make


def left(folder):
    return {path.name for path in folder.iterdir()}


def test_the_newest_ended_runs_are_kept(run, tmp_path):
    for number in range(5):
        run(f"r{number}", started=f"2026-01-0{9 - number}")
    remove(tmp_path, 2)
    assert left(tmp_path) == {"r0", "r1"}
    remove(tmp_path, 0)
    assert left(tmp_path) == set()


def test_a_killed_run_of_this_machine_has_ended(run, tmp_path):
    run("killed", ended=None)
    remove(tmp_path, 0)
    assert left(tmp_path) == set()


@pytest.mark.parametrize(
    "fields", [{"pid": os.getpid()}, {"host": "elsewhere"}, {"host": "elsewhere", "leader": False, "at": "node-b"}]
)
def test_a_run_that_may_live_is_kept(run, tmp_path, fields):
    run("lives", ended=None, **fields)
    remove(tmp_path, 0)
    assert left(tmp_path) == {"lives"}


def test_the_latest_leader_decides_for_other_machines(run, tmp_path):
    run("over", leader=True, term=3)
    run("over", ended=None, host="elsewhere", leader=False, at="node-lost")
    run("lives", leader=True, term=0)
    run("lives", ended=None, host="elsewhere", leader=True, term=3, at="node-b")
    run("rejoined", leader=True, term=0)
    run("rejoined", ended=None, pid=os.getpid(), leader=False, at="node-a~2")
    remove(tmp_path, 0)
    assert left(tmp_path) == {"lives", "rejoined"}


@pytest.mark.parametrize("text", [None, "", "[]", '{"ended": "2026"}'])
def test_a_directory_without_our_record_is_kept(tmp_path, text):
    (tmp_path / "theirs" / "logs").mkdir(parents=True)
    if text is not None:
        (tmp_path / "theirs" / "run.json").write_text(text)
    (tmp_path / "token").write_text("secret")
    remove(tmp_path, 0)
    assert left(tmp_path) == {"theirs", "token"}
    assert (tmp_path / "theirs" / "logs").exists()


def test_what_the_user_put_there_stays_and_no_link_is_followed(run, tmp_path):
    outside = tmp_path / "outside"
    (outside / "precious").mkdir(parents=True)
    folder = run("r")
    (folder / "weights.pt").write_text("precious")
    (folder / "node-x").symlink_to(outside)
    (tmp_path / "link").symlink_to(run("r2", pid=os.getpid(), ended=None))
    remove(tmp_path, 0)
    assert left(folder) == {"weights.pt"}
    assert (outside / "precious").exists()
    assert left(tmp_path) == {"outside", "r", "r2", "link"}


def test_a_place_that_is_not_there_is_reported_only(tmp_path, capfd):
    remove(tmp_path / "no", 0)
    assert "old runs are not removed" in capfd.readouterr().err


def test_a_name_can_be_used_again_when_its_run_has_ended(run, tmp_path):
    for number in (1, 2):
        aside = set_aside(run("alpha"))
        assert aside == tmp_path / f"alpha~{number}"
        assert left(aside) == {"run.json", "journal.jsonl", "logs"}
    assert left(tmp_path) == {"alpha~1", "alpha~2"}


def test_a_run_that_may_live_keeps_its_name(run, tmp_path):
    for name, more in {"live": {"pid": os.getpid()}, "elsewhere": {"host": "another"}}.items():
        assert set_aside(run(name, ended=None, **more)) is None
    (tmp_path / "empty").mkdir()
    assert set_aside(tmp_path / "empty") is None
    assert set_aside(tmp_path / "nothing") is None


def test_a_folder_with_files_of_the_users_keeps_its_name(run):
    mixed = run("mixed")
    (mixed / "results.csv").touch()
    assert set_aside(mixed) is None
    assert (mixed / "run.json").exists()


def test_the_working_directory_keeps_its_name(run, monkeypatch):
    here = run("here")
    monkeypatch.chdir(here / "logs")
    assert set_aside(here) is None
