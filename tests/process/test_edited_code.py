"""Which code is the script's: files that are edited while the job runs, and scripts that are installed as libraries are."""

import shutil

import pytest
from kit.cluster import SCRIPTS

EDITS = {
    "train.py": lambda text: text.replace("training.step(step.index)", "training.step(step.index + 1)"),
    "layouts.py": lambda text: f"{text}\nBlock.forward = lambda self, x: x + 2 * self.down(torch.relu(self.up(x)))\n",
}


@pytest.fixture
def held(cluster, tmp_path):
    """Start a job with code of its own, which waits in step 5; return it with the code's folder."""
    shutil.copytree(SCRIPTS, code := tmp_path / "code")
    words = ("--layout", "ddp", "--steps", "12", "--hold", "5", "--flags", str(tmp_path / "job0" / "flags"))
    job = cluster(*words, script=code / "train.py")
    job.wait_event("held")
    return job, code


def edit(code, name):
    before = (code / name).read_text()
    after = EDITS[name](before)
    assert after != before
    (code / name).write_text(after)


def test_a_replacement_runs_the_script_as_it_was(held, reference):
    job, code = held
    edit(code, "train.py")
    job.kill(2)
    job.release()
    job.check_repaired(reference("ddp", 12), [2])


def test_a_replacement_that_imports_an_edited_module_stops_the_job(held):
    job, code = held
    edit(code, "layouts.py")
    job.kill(2)
    job.release()
    assert job.wait_exit() == 94, job.told()
    assert f"{code / 'layouts.py'} was edited since the job began" in job.stderr
    assert "a replacement would run other code than the other ranks" in job.stderr
    assert not any(effect["type"] == "AttachGroups" and effect["epoch"] > 1 for effect in job.effects())


def test_a_module_that_was_only_touched_is_no_edit(held, reference):
    job, code = held
    (code / "layouts.py").touch()
    job.kill(2)
    job.release()
    job.check_repaired(reference("ddp", 12), [2])


def test_an_installed_script_is_no_library(cluster, reference, tmp_path):
    # It counts its steps in a variable. A library's variables are not kept.
    shutil.copytree(SCRIPTS, code := tmp_path / "site-packages" / "team")
    (code / "__init__.py").touch()
    text = (code / "train.py").read_text()
    for old, new in (
        ("    begun = Attempts()\n", "    begun, count = Attempts(), -1\n"),
        ("training.step(step.index)\n", "count += 1; training.step(count)\n"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (code / "train.py").write_text(text)
    words = ("--layout", "ddp", "--steps", "12", "--flags", str(tmp_path / "job0" / "flags"))
    job = cluster(*words, "--die", "rank=2,step=6,at=backward", script=code / "train.py")
    job.check_repaired(reference("ddp", 12), [2])
