"""What workers make of the signals that the agent passes on does not depend on who started the agent."""

import os
import signal

import pytest
from kit.choice import often
from kit.processes import marked


@pytest.mark.parametrize("number", often([signal.SIGINT, signal.SIGHUP], {signal.SIGINT}))
def test_a_job_that_was_started_with_a_signal_ignored_is_ended_by_it(cluster, number):
    """As in a shell's background job (SIGINT) or under nohup (SIGHUP): dispositions are inherited."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        job = cluster("--steps", "40", "--hold", "5", nproc=2, spares=1)
    finally:
        signal.signal(number, before)
    job.wait_event("held")
    job.signal_agent(number)
    assert job.wait_exit(20) == 1
    job.check_nothing_left()


def test_a_job_goes_on_when_its_end_is_preemption_notice(cluster):
    """Slurm's `--signal=USR1@SECONDS` reaches every process of a step; by default it would end them."""
    job = cluster("--steps", "12", "--hold", "5", nproc=2, spares=1)
    job.wait_event("held")
    for pid in marked(job.mark):
        os.kill(pid, signal.SIGUSR1)
    job.wait_stderr("SIGUSR1: the job will be ended soon")
    job.release()
    assert job.wait_exit() == 0
    assert len({event["pid"] for event in job.account.of("start")}) == 2
    job.check_nothing_left()


@pytest.mark.slow
def test_a_signal_to_every_process_at_once_leaves_workers_the_time_to_end(cluster):
    """As Slurm signals a step: the fork server and the store get it too, and are needed to the end."""
    job = cluster(script="ending.py", nproc=2, spares=0)
    for rank in range(2):
        job.wait_event("up", rank=rank)
    workers = {event["pid"] for event in job.events}
    others = marked(job.mark).keys() - workers - {job.pid}
    assert len(others) == 2
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM):
        for pid in {*others, *(workers | {job.pid} if number is signal.SIGTERM else ())}:
            os.kill(pid, number)
    for rank in range(2):
        job.wait_event("ending", rank=rank)
    assert others <= marked(job.mark).keys()
    job.release()
    job.release()
    for rank in range(2):
        job.wait_event("ended", rank=rank)
    assert job.wait_exit(20) == 1
    job.check_nothing_left()
