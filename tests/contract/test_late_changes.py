"""Weights that change in other places: in an unprotected module late in training, and in new parameters of a protected one."""

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
