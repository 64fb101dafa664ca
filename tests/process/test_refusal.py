"""The library in one worker refuses to go on: the whole job ends at once, with its reason and exit code."""

import pytest


@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ([], 94, "deadpool-run: stopping the job:\n  the optimizer is protected by nobody.\n  Write job.protect("),
        (
            ["--misuse"],
            1,
            "deadpool-run: stopping the job:\n  protect(): an object named 'model' is protected already.\n  Give each",
        ),
    ],
    ids=["refusal", "misuse"],
)
def test_one_rank_refuses_and_the_job_ends(cluster, words, code, reason):
    job = cluster(*words, script="refusing.py", nproc=2)
    assert job.wait_exit() == code, job.told()
    assert job.stderr.count(reason) == 1, job.told()
    assert job.stderr.count("Traceback (most recent call last)") == 1, job.told()
    assert "refusing.py" in job.stderr
    assert "bootstrap.py" not in job.stderr
    assert {event["restart"] for event in job.account.of("start")} == {0}
    assert not job.account.of("end")
    assert not any(effect["type"] == "AssignRank" and effect["replacement"] for effect in job.effects())
    job.check_nothing_left()
