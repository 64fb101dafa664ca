"""However a job ends, nothing of it is left: no process, no socket, no temporary file."""

import signal

import pytest
from kit.choice import often
from kit.processes import wait_dead, wait_gone

KEPT = {"script.py", "journal.jsonl", "samples.jsonl", "run.json", "logs"}
"""Files that the user may want to read after the end."""


def test_an_unfailed_job_leaves_what_is_to_be_read(cluster):
    job = cluster("--steps", "4")
    assert job.wait_exit() == 0, job.told()
    job.check_nothing_left()
    assert {path.name for path in job.run_dir.iterdir()} <= KEPT
    assert job.run_dir.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("moment", often(["start", "setup", "training", "repair"], {"repair"}))
def test_the_agent_is_killed(cluster, moment):
    job = cluster("--steps", "40", "--hold", "5", "--die", "rank=2,step=8,at=forward")
    if moment == "setup":
        job.wait_event("start")
    elif moment == "training":
        job.wait_event("held")
    elif moment == "repair":
        job.wait_event("held")
        job.release()
        job.wait_event("dying")
    job.signal_agent(signal.SIGKILL)
    assert job.wait_exit() == -signal.SIGKILL
    assert not wait_gone(job.mark, 5)


@pytest.mark.parametrize("number", often([signal.SIGTERM, signal.SIGINT], {signal.SIGTERM}))
@pytest.mark.parametrize("moment", often(["setup", "training"], {"training"}))
def test_the_agent_is_asked_to_stop(cluster, number, moment):
    job = cluster("--steps", "40", "--hold", "5")
    job.wait_event("start") if moment == "setup" else job.wait_event("held")
    job.signal_agent(number)
    assert job.wait_exit(20) == 1
    job.check_nothing_left()


@pytest.mark.slow
def test_a_worker_that_ignores_sigterm_is_ended_all_the_same(cluster):
    job = cluster(script="stubborn.py", options=("--shutdown-timeout", "1"), nproc=2)
    job.wait_event("start", nth=2)
    job.signal_agent(signal.SIGTERM)
    assert job.wait_exit(20) == 1
    job.check_nothing_left()


def test_helpers_of_a_killed_rank_die_with_it(cluster):
    job = cluster("die", script="parent.py")
    assert job.wait_exit() == 0, job.told()
    lost = job.account.of("helper", rank=1)[0]["helper"]
    assert wait_dead(lost)
    assert not wait_gone(job.mark, 5)


def test_a_script_that_cannot_start_ends_the_job(cluster):
    job = cluster(script="no_such_script.py")
    assert job.wait_exit(30) in {1, 2}
    assert "no_such_script.py" in job.stderr
    job.check_nothing_left()
