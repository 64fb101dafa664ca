"""The agent notices ended processes at once. It leaves none when it or a helper is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.processes import wait_dead, wait_gone

from deadpool_run.agent.records.run_record import make_run_dir
from deadpool_run.agent.spec import LaunchSpec, Mode, Target
from deadpool_run.agent.start import run
from deadpool_run.core.settings import Settings
from deadpool_run.errors import UsageError

NOTICED_S = 1.0
"""From a kill to its entry in the journal. Milliseconds on an idle machine; the bound allows for a busy one."""


def children(pid):
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {int(child) for task in tasks for child in (task / "children").read_text().split()}


@pytest.fixture
def family(cluster):
    """Fresh interpreters by default: they need no torch, so a job starts in half a second."""

    def start(method="spawn", spares=0):
        job = cluster(script="family.py", nproc=2, spares=spares, options=("--start-method", method))
        return job, [job.wait_event("start", rank=rank) for rank in (0, 1)]

    return start


def exits(job):
    return [line for line in job.journal() if line.get("event", {}).get("type") == "WorkerExited"]


@pytest.mark.parametrize(("method", "number"), [("forkserver", signal.SIGKILL), ("spawn", signal.SIGSEGV)])
def test_a_death_is_known_at_once_and_as_what_it_was(family, method, number):
    job, started = family(method)
    killed = time.monotonic()
    job.kill(1, number)
    assert job.wait_exit() == 1
    first = exits(job)[0]
    assert (first["event"]["signal"], first["event"]["code"]) == (number, None)
    assert 0 <= first["now"] - killed < NOTICED_S
    assert all(wait_dead(rank[kin], 0) for rank in started for kin in ("near", "far"))
    job.check_nothing_left()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_worker_whose_agent_was_killed_leaves_no_family(family, method):
    job, started = family(method, spares=1)
    job.signal_agent(signal.SIGKILL)
    assert job.wait_exit() == -signal.SIGKILL
    assert all(wait_dead(rank[kin]) for rank in started for kin in ("near", "far"))
    assert not wait_gone(job.mark, 10)


def test_workers_need_nobody_to_die_with_their_agent(family):
    job, started = family(spares=1)
    forkserver = forkserver_of(job, started)
    os.kill(forkserver, signal.SIGSTOP)
    job.signal_agent(signal.SIGKILL)
    assert job.wait_exit() == -signal.SIGKILL
    assert all(wait_dead(rank["pid"]) for rank in started)
    os.kill(forkserver, signal.SIGCONT)
    assert all(wait_dead(rank[kin]) for rank in started for kin in ("near", "far"))
    assert not wait_gone(job.mark, 10)


def forkserver_of(job, started):
    (found,) = (pid for pid in children(job.pid) - {rank["pid"] for rank in started} if is_forkserver(pid))
    return found


def is_forkserver(pid):
    """Of the agent's children, it alone holds a packet socket (type 5 in /proc/net/unix)."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile: the store opens and closes what it imports
            inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        parts = line.split()
        if parts[6] in inodes and parts[4] == "0005":
            return True
    return False


def test_workers_outlive_the_forkserver_and_the_next_one_knows_them(family):
    job, started = family(spares=1)
    forkserver = forkserver_of(job, started)
    os.kill(forkserver, signal.SIGKILL)
    assert wait_dead(forkserver)
    job.status()  # answered after the agent has noticed
    assert not wait_dead(started[0]["pid"], 0)
    assert not wait_dead(started[1]["pid"], 0)
    following = forkserver_of(job, started)
    assert following != forkserver
    job.signal_agent(signal.SIGKILL)
    assert job.wait_exit() == -signal.SIGKILL
    assert all(wait_dead(rank[kin]) for rank in started for kin in ("near", "far"))
    assert not wait_gone(job.mark, 10)


def test_a_forkserver_that_cannot_import_ends_the_job_with_the_reason(cluster):
    job = cluster(script="family.py", nproc=2, options=("--preload", "no_such_module"))
    assert job.wait_exit() == 1
    assert "cannot import no_such_module" in job.stderr
    job.check_nothing_left()


def test_the_store_is_replaced_at_its_address(cluster):
    job = cluster("hold", script="stores.py", nproc=2, spares=0)
    for rank in (0, 1):
        job.wait_event("set", rank=rank)
    workers = {event["pid"] for event in job.account.of("set")}
    (store,) = (pid for pid in children(job.pid) - workers if not is_forkserver(pid))
    os.kill(store, signal.SIGKILL)
    assert wait_dead(store)
    for _ in workers:
        job.release()
    assert job.wait_exit() == 0, job.told()
    assert [event["found"] for event in job.account.of("after")] == [False, False]
    job.check_nothing_left()


def test_each_generation_has_an_empty_store_at_the_same_address(cluster):
    job = cluster("die", script="stores.py", nproc=2, spares=0, options=("--max-restarts", "1"))
    assert job.wait_exit() == 0, job.told()
    before = job.account.of("before")
    assert [event["restart"] for event in before] == [0, 0, 1, 1]
    assert [event["found"] for event in before] == [False] * 4
    assert len({event["port"] for event in before}) == 1


@pytest.mark.parametrize("left", ["run.json", "journal.jsonl", "journal-before-term-2.jsonl"])
def test_a_run_directory_is_used_once(tmp_path, left):
    (tmp_path / left).touch()
    target = Target(Mode.EXEC, ("/bin/true",))
    spec = LaunchSpec(
        settings=Settings(world_size=1), target=target, nproc_per_node=1, run_id="second", run_dir=tmp_path
    )
    with pytest.raises(UsageError, match="holds another run\ngive this run another --run-id, or a --run-dir"):
        run(spec)


def test_a_directory_in_use_is_refused_with_the_name_of_its_run(tmp_path):
    (tmp_path / "run.json").write_text('{"run_id": "first", "started": "2026-01-02T03:04:05Z"}')
    with pytest.raises(UsageError, match=r"holds another run \(first, started 2026-01-02T03:04:05Z\)\n"):
        make_run_dir(tmp_path)


SIGNALS_ANOTHER_USER = """
import asyncio, os, signal
from deadpool_run.agent.processes import children

async def main():
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        os.setsid()
        os.read(reader, 1)
        os._exit(0)
    os.setuid(65534)  # as for a worker's child that runs a setuid program: it may not be signalled
    child = children.Process(pid, lambda end: None)
    child.signal(signal.SIGTERM)
    child.signal_group(signal.SIGKILL)
    children.kill_strangers(0.1)
    assert child.alive
    os.close(writer)
    await children.wait_gone([child], 10)
    assert not child.alive

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its user")
def test_a_child_of_another_user_is_left_alone():
    subprocess.run([sys.executable, "-c", SIGNALS_ANOTHER_USER], check=True, timeout=60)
