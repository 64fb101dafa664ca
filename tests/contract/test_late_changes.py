"""Weights that change in other places: in an unprotected module late in training, in new parameters of a protected one,
and in a container with a part that no snapshot holds."""

from pathlib import Path
from re import findall

import pytest
from kit.cluster import Cluster

REFUSED = 94
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize("replaced", [(), ("replaced",)])
@pytest.mark.parametrize(("how", "when"), [("counted", "in step 9"), ("data", "in training")])
def test_an_unprotected_module_that_first_changes_late_stops_the_job(how, when, replaced, cluster):
    """In that step, or at a loss if torch has counted no write. Also if no process is left that has begun with the job."""
    job: Cluster = cluster(how, *replaced, script=SCRIPTS / "late_change.py", nproc=2, spares=2)
    assert job.wait_exit() == REFUSED, job.told()
    said = " ".join(job.stderr.split())
    assert f"the module 'target' (Linear) is not protected, and its 'weight' changed {when}:" in said
    assert "trained to the end" not in job.stdout


def weights(job):
    assert job.wait_exit() == 0, job.told()
    found = dict(findall(r"rank (\d): (\S+)", job.stdout))
    assert len(found) == 2, job.told()
    return found


@pytest.mark.parametrize("where", ["forward", "end"])
def test_parameters_that_a_step_exchanges_are_exact(where, cluster):
    script = SCRIPTS / "exchanged.py"
    expected = weights(cluster(script=script, nproc=2, spares=1))
    job = cluster("5", where, script=script, nproc=2, spares=1)
    assert weights(job) == expected
    assert "replaced" in job.stderr or "recovered" in job.stderr


def test_a_container_with_a_part_that_no_snapshot_holds_is_exact(cluster):
    """The part is written in each step, and read by none."""
    script = SCRIPTS / "kept_with_a_part.py"
    expected = weights(cluster("no loss", script=script, nproc=2, spares=1))
    job = cluster("unused", script=script, nproc=2, spares=1)
    assert weights(job) == expected
    assert "replaced" in job.stderr or "recovered" in job.stderr


def test_a_replacement_is_refused_when_it_uses_such_a_part(cluster):
    job = cluster("used", script=SCRIPTS / "kept_with_a_part.py", nproc=2, spares=1)
    assert job.wait_exit() == REFUSED, job.told()
    said = " ".join(job.stderr.split())
    assert "an object of class re.Match in main().best" in said, job.told()
    assert "is carried from step to step, and snapshots do not keep it" in said
