import difflib
import re

from launches import ORDERLY, PYTHON, RECIPES, TORCHRUN, kill_rank, launched

OURS = RECIPES / "minimal" / "train.py"
THEIRS = RECIPES / "minimal" / "train_torchrun.py"


def weights(text):
    """Return what each rank said of its final weights, by rank."""
    return dict(re.findall(r"rank (\d+): the weights sum to (\S+)", text))


NO_NUMPY = """
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] == "numpy" else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""
"""A sitecustomize: torch can be installed without, and `pip install deadpool-run` does so."""


def test_protection_takes_one_import_and_at_most_six_changed_lines():
    one, other = ([line.strip() for line in path.read_text().splitlines() if line.strip()] for path in (THEIRS, OURS))
    diff = list(difflib.unified_diff(one, other, n=0, lineterm=""))[2:]
    added = [line[1:] for line in diff if line.startswith("+")]
    removed = [line[1:] for line in diff if line.startswith("-")]
    assert added.count("import deadpool_run as deadpool") == 1
    assert len(added) - 1 <= 6
    assert len(removed) <= len(added)


def test_runs_under_torchrun(start):
    assert set(weights(start(*TORCHRUN, "--nproc-per-node", 2, OURS, 20).end())) == {"0", "1"}


def test_runs_under_plain_python(start):
    assert set(weights(start(*PYTHON, OURS, 20).end())) == {"0"}


def test_a_killed_rank_does_not_change_the_weights(start, tmp_path):
    steps = 600
    expected = weights(start(*TORCHRUN, "--nproc-per-node", 2, ORDERLY, THEIRS, steps).end())
    assert set(expected) == {"0", "1"}
    (tmp_path / "sitecustomize.py").write_text(NO_NUMPY)
    run = start("env", f"PYTHONPATH={tmp_path}", *launched(tmp_path, 2), OURS, steps)
    run.wait_for("step 300", lambda: run.text().count("loss ") == 2)
    kill_rank(tmp_path, 1)
    assert weights(run.end()) == expected
