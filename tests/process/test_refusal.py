"""The library in one worker refuses to go on: the whole job ends at once, with its reason and exit code."""

from array import array

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


def test_a_group_that_a_replacement_does_not_create(cluster):
    """A warning comes before any loss. After one the job is stopped at once, and not when every attempt to connect was in vain."""
    job = cluster("--layout", "ddp", "--steps", "12", "--die", "rank=2,step=8,at=forward", script="late_group.py")
    assert job.wait_exit() == 94, job.told()
    warned, _, after = job.stderr.partition("repairing towards")
    assert warned.count("was created after the first two steps. A replacement") == 1, job.told()
    assert "ranks [2] are members of the group" in after, job.told()
    assert "connecting the same workers again" not in job.stderr
    assert not job.account.of("end")
    job.check_nothing_left()


@pytest.mark.slow
def test_a_replacement_names_what_snapshots_do_not_keep(cluster, reference):
    """The job goes on: only the user knows whether the weights depend on it."""
    job = cluster("--layout", "ddp", "--steps", "12", "--die", "rank=2,step=8,at=forward", script="with_bar.py")
    job.check_repaired(reference("ddp", 12), [2])
    before, _, after = job.stderr.partition("repairing towards")
    assert "snapshots do not keep" not in before
    assert after.count("bar: the new process of rank 2 goes on without what training has changed there") == 1, (
        job.told()
    )
    assert after.count("snapshots do not keep") == 1


def shared(cluster, folder, *words):
    (folder / "memory").write_bytes(array("f", [0.25, 0.5]).tobytes())
    return cluster(str(folder), *words, script="shared.py", nproc=2)


def test_memory_that_several_ranks_write(cluster, tmp_path):
    """A restore of one rank would undo what the others have written since. The trial finds it, before any loss."""
    job = shared(cluster, tmp_path, "--writes")
    assert job.wait_exit() == 94, job.told()
    assert "memory is carried from step to step, and snapshots do not keep it: other ranks of the node" in job.stderr
    assert "shared.py:" in job.stderr
    assert not job.account.of("end")
    job.check_nothing_left()


def test_memory_that_several_ranks_only_read(cluster, tmp_path):
    digests = set()
    for words in ([], ["--die"]):
        job = shared(cluster, tmp_path, *words)
        assert job.wait_exit() == 0, job.told()
        digests |= {event["digest"] for event in job.account.of("end")}
        job.check_nothing_left()
    assert "recovered rank 1" in job.stderr, job.told()
    assert len(digests) == 1


def test_an_exception_with_a_very_long_text_is_known_by_its_ends(cluster):
    job = cluster(script="long_error.py", nproc=1, spares=0)
    assert job.wait_exit() == 1, job.told()
    raised, *_ = [entry["event"] for entry in job.journal() if entry["event"]["type"] == "WorkerRaised"]
    assert raised["kind"] == "ValueError"
    assert raised["message"].startswith("beginxxx")
    assert raised["message"].endswith("xxxend")
    assert len(raised["message"]) < 100_000
