"""One of four hosts is broken, in every way, and comes back: the leader's, a follower's, or that in reserve."""

import pytest
from kit.breaking import LOST, Breakage
from kit.choice import often

STEPS = 120
HELD = ("--hold", str(STEPS - 1), "--hold-rank", "-1")
"""On a busy machine the host would else not be back before the job ends."""
WHOSE = ("the leader's", "a follower's", "the reserve")
USUAL = {("reject", "the reserve"), ("power", "the leader's")}


def host_of(job, whose):
    """Return the host of that kind."""
    training = {job.host_of(rank) for rank in range(6)}
    if whose == "the reserve":
        return next(host for host in range(4) if host not in training)
    return 0 if whose == "the leader's" else min(training - {0})


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("how", "whose"), often([(how, whose) for how in LOST for whose in WHOSE], USUAL))
def test_a_host_that_is_broken_and_comes_back_joins_the_living_job(fleet, net, reference, how, whose):
    job = fleet("--layout", "ddp", "--steps", str(STEPS), "--least-ms", "100", *HELD)
    for rank in range(6):
        job.wait_state(rank, 5)
    job.wait_whole(4, 2)
    job.wait_voters(3)
    host = host_of(job, whose)
    ranks = [rank for rank in range(6) if job.host_of(rank) == host]
    assert bool(ranks) == (whose != "the reserve")
    broken = Breakage(job, net, host, how)
    for rank in ranks:
        job.wait_until(lambda rank=rank: len(job.account.pids(rank)) > 1, f"a replacement for rank {rank}")
    broken.undo()
    job.wait_whole(4, 2)
    job.release(6)
    job.check_repaired(reference("ddp", STEPS, steps=STEPS), ranks, range(4))
