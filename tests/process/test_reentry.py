"""A survivor whose step cannot be aborted runs its script again from the top, in the same process."""

import pytest
from kit.choice import often

STEPS = 10
DIE = ("--die", "rank=1,step=5,at=counted")


def train(cluster, kind, *words, layout="ddp-full", **options):
    return cluster("--layout", layout, "--steps", str(STEPS), "--astray", kind, *DIE, *words, **options)


def reentered(job):
    return [incident["reentered"] for incident in job.incidents()]


KINDS = {kind: [0, 2, 3] for kind in ("raise", "index", "swallow", "swallow-outside", "exit", "leave")} | {"solve": [3]}
"""Each with the ranks that go astray when rank 1 is lost."""


@pytest.mark.parametrize("kind", often(KINDS, {"swallow"}))
@pytest.mark.parametrize("layout", often(["ddp-full", "fsdp", "tp"], {"ddp-full", "fsdp"}))
def test_survivors_that_go_astray_run_their_script_again(cluster, reference, kind, layout):
    job = train(cluster, kind, layout=layout)
    job.check_repaired(reference(layout, STEPS), [1])
    assert reentered(job) == [KINDS[kind]]
    for rank in KINDS[kind]:
        assert len(job.account.of("start", rank=rank)) == 2
        (last,) = job.account.of("last model", rank=rank)
        assert last["freed"], "the first run's model is still in memory"


def test_a_script_that_hides_a_half_done_update_is_replaced(cluster, reference):
    """Nobody is lost: an exception leaves the optimizer's step on rank 1, and the script goes on."""
    job = cluster(
        "--layout",
        "ddp",
        "--steps",
        str(STEPS),
        "--astray",
        "swallow",
        "--die",
        "rank=1,step=5,at=optimizer,how=raise-once,n=3",
    )
    job.check_repaired(reference("ddp", STEPS), [1])
    assert "an exception left an optimizer's step in step 5" in job.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["retry", "converge"])
def test_a_survivor_that_does_not_end_its_step_runs_its_script_again(cluster, reference, kind):
    job = train(cluster, kind, options=("--abort-timeout", "1"))
    job.check_repaired(reference("ddp-full", STEPS), [1])
    assert reentered(job) == [[0, 2, 3]]


def test_a_survivor_whose_script_cannot_run_twice_is_replaced(cluster, reference):
    job = train(cluster, "once", "--astray-rank", "2")
    job.check_repaired(reference("ddp-full", STEPS), [1, 2])
    assert reentered(job) == [[2]]
    assert "can be registered only once" in job.stderr


@pytest.mark.slow
def test_a_survivor_that_is_stuck_outside_of_python_is_replaced(cluster, reference):
    job = train(cluster, "sleep", "--astray-rank", "2", options=("--abort-timeout", "0.5"))
    job.check_repaired(reference("ddp-full", STEPS), [1, 2])
    assert "could not leave its run" in job.stderr
