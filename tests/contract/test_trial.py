"""The trial repeats a step that updates, and accepts that DDP changes the order of its sums."""

from pathlib import Path

import pytest
from kit.cluster import Cluster

SCRIPT = Path(__file__).parent / "scripts" / "late_reduction.py"
ONLY_OBJECT = SCRIPT.with_name("only_object.py")


@pytest.mark.parametrize(("accumulated", "options"), [(2, ()), (6, ()), (2, ("--sharded",))])
def test_the_trial_accepts_a_first_reduction_after_step_0(accumulated, options, cluster):
    job: Cluster = cluster(str(accumulated), *options, script=SCRIPT, nproc=3)
    assert job.wait_exit() == 0, job.told()
    tried = {event["index"] for event in job.account.of("step") if event["rehearsing"]}
    update = 2 * accumulated - 1  # the first update decides the buckets, the second one is repeated
    assert update in tried
    assert max(tried) == update


def test_weights_in_an_object_of_the_scripts_own_are_exact(cluster):
    """No module and no optimizer is protected: the trial still ends, and a loss changes nothing."""

    def weights(job):
        return {(event["rank"], event["index"]): event["sum"] for event in job.account.of("weights")}

    unfailed: Cluster = cluster("14", script=ONLY_OBJECT, nproc=2)
    assert unfailed.wait_exit() == 0, unfailed.told()
    job: Cluster = cluster("14", script=ONLY_OBJECT, nproc=2, spares=1)
    job.wait_event("weights", rank=1, index=5)
    job.kill(1)
    assert job.wait_exit() == 0, job.told()
    assert weights(job) == weights(unfailed)
    assert len(weights(job)) == 28
    assert {event["index"] for event in unfailed.account.of("step") if event["rehearsing"]} == {1}
