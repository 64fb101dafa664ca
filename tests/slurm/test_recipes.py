"""The batch scripts of recipes/slurm, as Slurm takes them."""

import re
import subprocess
from pathlib import Path

import pytest

from deadpool_run.agent.slurm import batch_script
from deadpool_run.cli.options.table import BY_NAME

FOLDER = Path(__file__).parents[2] / "recipes" / "slurm"
SCRIPTS = sorted(FOLDER.glob("*.sbatch"))


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
