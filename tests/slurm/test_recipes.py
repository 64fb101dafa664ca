"""The batch scripts of recipes/slurm, as Slurm takes them."""

import re
import subprocess
from pathlib import Path

import pytest

from deadpool_run.agent.discovery import batch_script
from deadpool_run.cli.table import BY_NAME

FOLDER = Path(__file__).parents[2] / "recipes" / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))
STAND_IN = """#!/bin/bash
# Saves and leaves at the first USR1, the first time; ends well the second time.
echo "started: $* (restarts: ${SLURM_RESTART_COUNT:-0})"
[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || exit 0
trap 'echo saved; exit 75' USR1
while :; do sleep 0.1; done
"""


def line_of(script):
    (line,) = re.findall(r"^deadpool-run (.*)$", script.read_text(), re.MULTILINE)
    return line


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_is_good_bash_and_a_job_that_survives(script):
    subprocess.run(["bash", "-n", script], check=True)
    text = script.read_text()
    assert batch_script.survives_node_loss(text) or "--requeue" in batch_script.options(text)
    named = {flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+)", line_of(script))}
    assert named <= BY_NAME.keys()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_slurm_takes_it(shared_lab, script):
    told = shared_lab.run("sbatch", "--test-only", str(script))
    assert "to start at" in told.stderr


def test_the_readme_names_them_all():
    assert set(re.findall(r"^\| `(.*?)`", (FOLDER / "README.md").read_text(), re.MULTILINE)) == {
        script.name for script in SCRIPTS
    }


def test_before_the_limit_a_job_saves_and_is_queued_again(lab):
    (lab.home / "bin" / "deadpool-run").write_text(STAND_IN)
    job = lab.sbatch(FOLDER / "limit.sbatch", "--nodes=2", "--nodelist=n1,n2")
    job.wait_output("started:")
    job.signal_batch("USR1")
    job.wait("PENDING")
    assert "saved" in job.output()
    job.wait_gone("n1")
    job.hurry()
    assert job.wait() == "COMPLETED"
    assert job.output().count("started:") == 2, "and the second appends to what the first printed"
