"""Set-up of a replacement: it gets what the other ranks sent in set-up, or the job stops if it depends on something else."""

from pathlib import Path

import pytest
from kit.cluster import Cluster

REFUSED = 94
SCRIPT = Path(__file__).parent / "scripts" / "setup_facts.py"
HOT = ("--spare-mode", "hot")


def run(cluster, tmp_path, case, *death, **options) -> Cluster:
    folder = tmp_path / "-".join(("files", *death))
    folder.mkdir()
    job: Cluster = cluster(case, str(folder), *death, script=SCRIPT, nproc=2, spares=1, **options)
    job.wait_exit()
    return job


def weights(job):
    assert job.exit_code == 0, job.told()
    return {event["sum"] for event in job.account.of("weights")}


def said(job):
    return " ".join(job.stderr.split())


@pytest.mark.parametrize(
    "case", ["teacher", "statistics", "asynchronous-statistics", "large-state", "unused-number", "own-values"]
)
def test_a_replacement_has_the_set_up_of_its_rank(case, cluster, tmp_path):
    unfailed, replaced = run(cluster, tmp_path, case), run(cluster, tmp_path, case, "1", "6")
    assert weights(replaced) == weights(unfailed)
    assert len(replaced.incidents()) == 1


@pytest.mark.parametrize(
    ("case", "part"),
    [
        ("total", "job.steps() has 9 steps here and had 12 in the rank's first process"),
        ("number", "start (in the closure of main().prepared) is 3 here and was 0 in the rank's first process"),
        ("tensor", "mean (in the closure of main().prepared) has other numbers here than in the rank's first process"),
    ],
)
@pytest.mark.parametrize("options", [(), HOT], ids=["warm", "hot"])
def test_a_set_up_that_reads_what_training_wrote_is_refused(case, part, options, cluster, tmp_path):
    job = run(cluster, tmp_path, case, "1", "6", options=options)
    assert job.exit_code == REFUSED, job.told()
    assert part in said(job), job.told()


def test_a_number_that_differs_is_reported(cluster, tmp_path):
    job = run(cluster, tmp_path, "unused-number", "1", "6")
    assert job.exit_code == 0, job.told()
    assert "start (in the closure of main().prepared) is 3 here and was 0 in the rank's first process" in said(job), (
        job.told()
    )


def test_data_of_set_up_that_no_transcript_can_hold_is_refused_at_the_start(cluster, tmp_path):
    job = run(cluster, tmp_path, "too-large")
    assert job.exit_code == REFUSED, job.told()
    assert "broadcast of [16777217] float32" in said(job), job.told()
