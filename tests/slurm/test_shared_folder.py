"""Agents that know nothing of each other agree on a token."""

import os
import subprocess
import sys

import pytest

from deadpool_run.agent.rendezvous.shared_folder import SharedFolder
from deadpool_run.errors import UsageError

RACE = """
import sys
from pathlib import Path
from deadpool_run.agent.rendezvous.shared_folder import SharedFolder
folder = SharedFolder(Path(sys.argv[1]))
sys.stdin.read()
print(folder.token())
"""


def test_many_agree_on_one_token(tmp_path):
    folder = tmp_path / "state" / "run"
    SharedFolder(folder)
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(6)
    ]
    for racer in racers:
        racer.stdin.close()
    told = [racer.stdout.read() for racer in racers]
    for racer in racers:
        racer.stdout.close()
        assert racer.wait(20) == 0
    assert len(set(told)) == 1
    assert [path.name for path in folder.iterdir()] == ["token"]
    SharedFolder(folder).remove_token()
    SharedFolder(folder).remove_token()
    assert not list(folder.iterdir())


def test_nobody_else_can_read_the_token(tmp_path):
    folder = SharedFolder(tmp_path / "run")
    before = os.umask(0)
    try:
        folder.token()
    finally:
        os.umask(before)
    assert (tmp_path / "run" / "token").stat().st_mode & 0o777 == 0o600
    (tmp_path / "run").chmod(0o755)
    with pytest.raises(UsageError, match="others may enter it"):
        SharedFolder(tmp_path / "run")


def test_a_folder_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="XDG_STATE_HOME"):
        SharedFolder(tmp_path / "file" / "run")
