"""A rank lives and makes no progress: it is ended and replaced; one that is only slow is left alone."""

import json
import re

import pytest

RANKS = 3
STEPS = 12
TIMEOUT_S = 2


def train(cluster, *faults, layout="ddp"):
    words = [word for fault in faults for word in ("--die", fault)]
    options = ("--hang-timeout", str(TIMEOUT_S))
    return cluster(
        "--layout", layout, "--steps", str(STEPS), *words, script="hanging.py", nproc=RANKS, spares=1, options=options
    )


def check(job, reference, lost):
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(reference)
    job.account.check_ranks(lost, RANKS)
    job.account.check_steps_repeated(job.effects())
    job.check_nothing_left()


def hung(job):
    """Return the rank and the reason of each hang that the agent told the coordinator of."""
    ranks = {e["worker"]: e["rank"] for e in job.account.of("start")}
    events = [line["event"] for line in job.journal() if "WorkerHung" in json.dumps(line.get("event"))]
    return [(ranks[event["worker"]], event["reason"]) for event in events]


def test_a_rank_that_hangs_in_step_0_starts_the_world_again(cluster, unfailed):
    job = train(cluster, "rank=1,step=0,at=between,how=sigstop")
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(unfailed)
    ((rank, reason),) = hung(job)
    assert rank == 1
    assert "rank 1 is stopped by a signal" in reason
    assert {event["restart"] for event in job.account.of("end")} == {1}
    job.check_nothing_left()


@pytest.mark.parametrize(
    ("where", "seen"),
    [
        pytest.param("at=forward,how=sigstop", "rank 1 is stopped by a signal", marks=pytest.mark.slow),
        ("at=collective,how=sigstop", "rank 1 is stopped by a signal"),
        pytest.param("at=before,how=loop", "rank 1 waits for no collective", marks=pytest.mark.slow),
        ("at=between,how=loop", "rank 1 waits for no collective"),
    ],
)
def test_a_rank_that_hangs_is_replaced(cluster, unfailed, where, seen):
    job = train(cluster, f"rank=1,step=5,{where}")
    check(job, unfailed, [1])
    ((rank, reason),) = hung(job)
    assert rank == 1
    assert reason.startswith(f"no rank has made progress for {TIMEOUT_S} s: {seen}")
    assert len(job.account.of("dying")) == 1


@pytest.mark.slow
def test_a_rank_that_is_stopped_after_its_last_step_has_the_scripts_ends_run_again(cluster, unfailed):
    """Without the hang detector the job would wait for it for ever."""
    job = train(cluster, "rank=1,step=-1,at=end,how=sigstop")
    assert job.wait_exit() == 0, job.told()
    job.account.check_same_as(unfailed)
    ((rank, reason),) = hung(job)
    assert rank == 1
    assert "rank 1 is stopped by a signal" in reason
    job.check_nothing_left()


def test_a_rank_that_takes_long_after_its_last_step_is_left_alone(cluster, unfailed):
    job = train(cluster, "rank=1,step=-1,at=end,how=doze")
    check(job, unfailed, [])
    assert hung(job) == []


@pytest.mark.slow
def test_after_a_repair_survivors_and_replacement_are_judged_by_the_same_counts(cluster, unfailed):
    """Else what the repair cut would look like a wait for ever after, and the replacement like the one that is behind."""
    job = train(cluster, "rank=2,step=4,at=before", "rank=0,step=8,at=before,how=loop")
    check(job, unfailed, [2, 0])
    ((rank, reason),) = hung(job)
    assert rank == 0
    waiting = re.findall(r"rank \d waits in a collective \(.*?, (\d+) collectives issued, (\d+) completed\)", reason)
    assert len(waiting) == RANKS - 1
    assert len(set(waiting)) == 1, reason


def test_a_slow_rank_is_left_alone(cluster, unfailed):
    """Together its naps last much longer than the time-out, and the others wait for it all that time."""
    job = train(cluster, *(f"rank=1,step={step},at=before,how=nap" for step in range(2, STEPS)))
    check(job, unfailed, [])
    assert len(job.account.of("dying")) == STEPS - 2
    assert hung(job) == []
