"""A rank that is slowed on purpose: slower than the others of its run, never taken for hung, and the weights are the same."""

import re

RANKS = 2
STEPS = 30
SLOW_FROM = 8
FACTOR = 4


def slowness(job, rank, steps):
    """Return how many times as long as the other rank this one has worked in these steps."""
    taken = [
        sum(event["seconds"] for event in job.account.of("worked", rank=each) if event["step"] in steps)
        for each in (rank, 1 - rank)
    ]
    return taken[0] / taken[1]


def test_a_slowed_rank_is_slower_than_the_other_and_is_not_lost(cluster, unfailed):
    options = ("--hang-timeout", "5", "--chaos", f"kill rank 1 with slow:{FACTOR} for 600s at step {SLOW_FROM}")
    job = cluster("--steps", str(STEPS), script="uneven.py", nproc=RANKS, spares=1, options=options)
    job.wait_stderr("chaos: rank 1 is slowed 4 times for 600 s, fault 1")
    job.wait_status(lambda status: [rank["slowed"] for rank in status["ranks"]] == [1, FACTOR], "a slowed rank")
    assert job.wait_exit(timeout_s=200) == 0, job.told()
    (slowed,) = [entry["event"] for entry in job.journal() if entry["event"]["type"] == "SlowRequested"]
    assert (slowed["rank"], slowed["factor"], slowed["for_s"]) == (1, FACTOR, 600)
    assert slowness(job, 1, range(SLOW_FROM + 4, STEPS)) > FACTOR / 2, job.told()
    assert slowness(job, 1, range(2, SLOW_FROM)) < FACTOR / 2, job.told()
    assert job.incidents() == []
    assert re.search(r"rank 1 \(worker \d\) is slowed 4 times for 600 s: a user injected this fault", job.stderr)
    assert "1 fault injected (1 slow), 1 of slow ranks, 0 steps repeated" in job.stderr
    assert "the run survived" in job.stderr
    job.account.check_same_as(unfailed)
    job.account.check_ranks([], RANKS)
    job.account.check_one_at_a_time()
    job.check_nothing_left()
