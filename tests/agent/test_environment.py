"""A worker is given what torchrun gives it, in a process that looks as if it had been started by itself."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "process" / "scripts" / "report.py"
OURS = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "TMPDIR", "PYTHONHASHSEED"}
"""Variables whose values differ between two runs of torchrun too, or that the kit sets, and the seed of hashes."""


def reports(folder, world_size=2):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


@pytest.fixture
def job(cluster, tmp_path):
    def start(*words, folder="ours", **options):
        target = tmp_path / folder
        target.mkdir()
        started = cluster(str(target), *words, script="report.py", nproc=2, spares=0, **options)
        assert started.wait_exit() == 0, started.told()
        started.check_nothing_left()
        return started, reports(target)

    return start


def torchrun(folder, env, *options):
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        *options,
        str(SCRIPT),
        str(folder),
    ]
    subprocess.run(command, check=True, env=env, capture_output=True, timeout=60)
    return reports(folder)


def test_it_is_torchruns(job, tmp_path, monkeypatch):
    outer = {"PET_NNODES": "1", "TORCHELASTIC_RUN_ID": "outer", "DEADPOOL_WORKER": "7", "RANK": "9"}
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in outer.items():
        monkeypatch.setenv(name, value)
    ours, given = job(options=("--max-restarts", "3"))
    env = {name: value for name, value in ours._environment(None).items() if name not in outer}
    theirs = torchrun(tmp_path / "theirs", env, "--standalone", "--max-restarts", "3")
    for mine, other in zip(given, theirs, strict=True):
        differing = {
            name
            for name in mine["env"].keys() | other["env"].keys()
            if mine["env"].get(name) != other["env"].get(name) and not name.startswith("DEADPOOL_")
        }
        assert differing <= OURS, {name: (mine["env"].get(name), other["env"].get(name)) for name in differing}
        assert mine["env"].keys() >= OURS
        assert not {name for name in mine["env"] if name.startswith("PET_")}
        assert [mine[part] for part in ("path", "flags", "main", "session")] == [
            other[part] for part in ("path", "flags", "main", "session")
        ]


@pytest.mark.slow
def test_omp_num_threads_is_left_alone_for_one_worker(cluster, tmp_path, monkeypatch):
    job = cluster(str(tmp_path), script="report.py", nproc=1, spares=0, env={"OMP_NUM_THREADS": "3"})
    assert job.wait_exit() == 0, job.told()
    assert reports(tmp_path, 1)[0]["env"]["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in job.stderr


def test_a_spawned_worker_is_a_fresh_interpreter(job):
    started, given = job("0", options=("--start-method", "spawn"))
    _, forked = job("0", folder="forked")
    for fresh, warm in zip(given, forked, strict=True):
        assert (fresh["torch"], warm["torch"]) == (False, True)
        assert fresh["parent"] == started.pid
        assert (fresh["path"], fresh["flags"], fresh["main"]) == (warm["path"], warm["flags"], warm["main"])
        assert fresh["env"].keys() == warm["env"].keys()


def test_all_interpreters_of_all_runs_order_sets_of_strings_alike(job, monkeypatch):
    """A replacement may be in another interpreter than the lost rank, or in another run, after a durable checkpoint."""
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    _, spawned = job("0", options=("--start-method", "spawn"))
    _, forked = job("0", folder="forked")
    assert len({tuple(each["order"]) for each in (*spawned, *forked)}) == 1
    monkeypatch.setenv("PYTHONHASHSEED", "42")
    _, users = job("0", folder="users")
    assert {each["env"]["PYTHONHASHSEED"] for each in users} == {"42"}


def test_no_python_runs_any_program(cluster, tmp_path):
    job = cluster(
        "-c",
        f"echo $RANK ${{local_rank}} > {tmp_path}/$RANK",
        script="/bin/sh",
        nproc=2,
        spares=0,
        options=("--no-python",),
    )
    assert job.wait_exit() == 0, job.told()
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["0 0\n", "1 1\n"]


@pytest.mark.slow
def test_the_module_form(cluster, tmp_path):
    (tmp_path / "my_module.py").write_text("import os, sys; print(__name__, sys.argv[1:], flush=True)")
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    job = cluster("a", nproc=1, spares=0, script="report.py", options=("-m", "my_module"), env={"PYTHONPATH": path})
    assert job.wait_exit() == 0, job.told()
    assert job.stdout == f"__main__ ['{SCRIPT}', 'a']\n"
