"""The trial repeats a step that updates, and accepts that DDP changes the order of its sums."""

from pathlib import Path

import pytest
from kit.cluster import Cluster

SCRIPT = Path(__file__).parent / "scripts" / "late_reduction.py"


@pytest.mark.parametrize(("accumulated", "options"), [(2, ()), (6, ()), (2, ("--sharded",))])
def test_the_trial_accepts_a_first_reduction_after_step_0(accumulated, options, cluster):
    job: Cluster = cluster(str(accumulated), *options, script=SCRIPT, nproc=3)
    assert job.wait_exit() == 0, job.told()
    tried = {event["index"] for event in job.account.of("step") if event["rehearsing"]}
    update = 2 * accumulated - 1  # the first update decides the buckets, the second one is repeated
    assert update in tried
    assert max(tried) == update
