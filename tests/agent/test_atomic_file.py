"""Files that are replaced or created as a whole leave nothing else behind."""

import signal
import stat
import subprocess
import sys

import pytest

from deadpool_run.agent import atomic_file


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


def names(folder):
    return [path.name for path in folder.iterdir()]


def test_a_file_is_replaced(tmp_path):
    path = tmp_path / "file"
    atomic_file.replace(path, "one")
    atomic_file.replace(path, "two")
    assert (path.read_text(), mode_of(path), names(tmp_path)) == ("two", 0o600, ["file"])


def test_a_name_that_is_taken_stays(tmp_path):
    path = tmp_path / "file"
    assert atomic_file.create(path, "one")
    assert not atomic_file.create(path, "two")
    assert (path.read_text(), mode_of(path), names(tmp_path)) == ("one", 0o600, ["file"])


def test_a_draft_that_cannot_be_renamed_is_removed(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError):
        atomic_file.replace(tmp_path / "file", "one")
    assert names(tmp_path) == ["file"]


BESIDE_A_LINK = """
import os, signal, sys
from pathlib import Path
from deadpool_run.agent import atomic_file
seen = []
def beside(event, args):
    if event == "os.link" and not seen:
        seen.append(args)
        {what}
sys.addaudithook(beside)
print(atomic_file.create(Path(sys.argv[1]), "mine"))
"""


def create_while(what, path):
    script = BESIDE_A_LINK.format(what=what)
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout.strip()


def test_a_link_whose_answer_was_lost_counts(tmp_path):
    """An NFS client repeats a request that got no answer. The second one finds the name taken, by the first."""
    assert create_while("os.link(args[0], args[1])", tmp_path / "file") == (0, "True")
    assert ((tmp_path / "file").read_text(), names(tmp_path)) == ("mine", ["file"])


def test_a_name_that_is_taken_at_the_last_moment_stays(tmp_path):
    assert create_while("Path(sys.argv[1]).write_text('theirs')", tmp_path / "file") == (0, "False")
    assert ((tmp_path / "file").read_text(), names(tmp_path)) == ("theirs", ["file"])


def test_who_dies_before_the_link_has_not_taken_the_name(tmp_path):
    assert create_while("os.kill(os.getpid(), signal.SIGKILL)", tmp_path / "file") == (-signal.SIGKILL, "")
    assert atomic_file.create(tmp_path / "file", "later")
