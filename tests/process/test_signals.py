"""What workers make of the signals that the agent passes on does not depend on who started the agent."""

import signal

import pytest


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
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
