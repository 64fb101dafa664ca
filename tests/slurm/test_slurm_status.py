"""A run in a Slurm job, seen from outside its nodes."""

import json
from pathlib import Path

TRAIN = Path(__file__).parents[2] / "recipes" / "minimal" / "train.py"


def test_a_run_is_seen_from_a_login_node(lab):
    job = lab.sbatch(f"#!/bin/bash\nexec deadpool-run --no-config --nproc-per-node 2 {TRAIN} 1000000\n", "-w", "n3")
    job.wait_output("loss")
    done = lab.run("deadpool-run", "status", "--json", "--slurm-job", str(job.number))
    status = json.loads(done.stdout)
    assert (status["phase"], len(status["ranks"])) == ("running", 2)
    assert done.stderr == ""
    job.cancel()
    job.wait()
    gone = lab.run("deadpool-run", "status", "--slurm-job", str(job.number), check=False)
    assert gone.returncode == 4
    assert f"Slurm job {job.number} is not running" in gone.stderr


def test_a_job_without_a_run_is_said_to_have_none(shared_lab):
    job = shared_lab.sbatch("#!/bin/bash\nsleep 60\n", "-N2")
    job.wait("RUNNING")
    none = shared_lab.run("deadpool-run", "status", "--slurm-job", str(job.number), check=False)
    assert none.returncode == 4
    assert "no live run on the nodes of Slurm job" in none.stderr
    assert "(asked n1, n2)" in none.stderr
    job.cancel()
    job.wait()


def test_what_is_no_job_is_refused(shared_lab):
    for wrong in ("x", "1;2", ""):
        refused = shared_lab.run("deadpool-run", "status", "--slurm-job", wrong, check=False)
        assert refused.returncode == 2, refused.stderr
