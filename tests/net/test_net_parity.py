"""Ranks of different hosts share parities: a lost host's ranks are computed from them, in memory of less than a copy each."""

import pytest

STEPS = 30
STEP = ("--least-ms", "100")
HOLDS = 64
"""More than there are processes in a job."""


@pytest.mark.parametrize("ranks_per_parity", [3, pytest.param(2, marks=pytest.mark.slow)])
def test_a_lost_hosts_ranks_are_computed_from_parities(fleet, reference, ranks_per_parity):
    """With 3, the reserve has all parities and takes the ranks. With 2, some rank is computed for another host."""
    options = ("--redundancy", f"xor:{ranks_per_parity}")
    job = fleet("--layout", "fsdp", "--steps", str(STEPS), *STEP, options=options)
    for rank in range(6):
        job.wait_state(rank, 5)
    homes = {rank: job.host_of(rank) for rank in range(6)}
    lost = next(host for host in (2, 1, 3) if host in homes.values())
    job.power_off(lost)
    ranks = [rank for rank in homes if homes[rank] == lost]
    job.check_repaired(reference("fsdp", STEPS), ranks, [host for host in range(4) if host != lost])


@pytest.mark.slow
def test_two_lost_hosts_of_a_group_stop_the_job_and_the_missing_rank_is_named(fleet):
    options = ("--redundancy", "xor:2", "--join-timeout", "5", "--repair-timeout", "10")
    words = ("--layout", "fsdp", "--steps", str(STEPS), *STEP, "--hold-replacements")
    job = fleet(*words, spares="2", nproc=1, options=options)
    for rank in range(2):
        job.wait_state(rank, 5)
    first, second = sorted((job.host_of(rank) for rank in range(2)), reverse=True)  # the leader's host last
    rest = [host for host in range(4) if host not in (first, second)]
    job.power_off(first)
    job.wait_voters(3, first)
    job.power_off(second)
    job.release(HOLDS)
    assert job.wait_exit(rest) == [1, 1]
    told = "".join(job.agents[host].output for host in rest)
    assert "every holder of rank 1 is gone" in told or "which shares the parity, did not come from" in told
